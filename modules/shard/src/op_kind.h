#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <optional>
#include <string_view>
#include <vector>

namespace ebb::shard {

/// What becomes of an operator while a model is recorded.
enum class OpKind {
  kThrough, ///< A view, or made of other operators, which come one by one.
  kEmpty, ///< Allocates and does not write.
  kReads, ///< Gives something else than tensors.
  kMakes, ///< Gives new tensors.
  kWrites, ///< Writes to some of its arguments.
};
OpKind kind_of(const c10::OperatorHandle& op, c10::DeviceType device);

/// Draws random numbers.
bool is_random(const c10::OperatorHandle& op);
/// Gives its first argument values that do not depend on those it had.
bool overwrites_first(const c10::OperatorHandle& op);
/// Resizes what it writes to.
bool is_out(const c10::OperatorHandle& op);

/// Which argument has this name.
std::optional<std::size_t> index_of(const c10::OperatorHandle& op, std::string_view argument);

void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& function);
c10::IValue with_tensors(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& replace);

/// Arguments of the schema that are written to, among `inputs`.
std::vector<at::Tensor> written_of(const c10::OperatorHandle& op, const std::vector<c10::IValue>& inputs);

} // namespace ebb::shard
