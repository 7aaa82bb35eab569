#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ebb::shard {

/// What `op` returns for tensors like those among `inputs`, as tensors on the meta device with the sizes, strides and
/// dtypes of the CPU's results, without computing it: by rule, or by LibTorch's meta kernel. Empty where neither exists.
std::optional<torch::jit::Stack> results_like(const c10::OperatorHandle& op, const std::vector<c10::IValue>& inputs);

/// By running it on zeros in place of tensors without memory: for any operator, at its price.
torch::jit::Stack results_on_zeros(const c10::OperatorHandle& op, const std::vector<c10::IValue>& inputs);

/// Tensors of at most so many elements get memory and values also where larger ones do not.
inline constexpr std::int64_t kSmallNumel = 4096;

/// A tensor with the sizes, strides and dtype of `like` on a storage without memory. `nothing` holds no data: its device
/// is the tensor's, and its deleter runs when the storage goes. Access by pointer throws `message`.
at::Tensor empty_without_memory(const at::Tensor& like, c10::DataPtr nothing, const std::string& message);

/// Whether its storage has a size and no memory.
bool is_without_memory(const at::Tensor& tensor);

/// The arguments of a call, from the top of the stack, where they stay.
std::vector<c10::IValue> inputs_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

} // namespace ebb::shard
