#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <vector>

namespace ebb::shard {

/// What `op` returns for tensors like those among `inputs`, as tensors on the meta device with the sizes, strides and
/// dtypes of the CPU's results, without computing it: by rule, or by LibTorch's meta kernel. Empty where neither exists.
std::optional<torch::jit::Stack> results_like(const c10::OperatorHandle& op, const std::vector<c10::IValue>& inputs);

/// By running it on zeros in place of tensors without memory: for any operator, at its price.
torch::jit::Stack results_on_zeros(const c10::OperatorHandle& op, const std::vector<c10::IValue>& inputs);

/// Whether its storage has a size and no memory.
bool is_without_memory(const at::Tensor& tensor);

} // namespace ebb::shard
