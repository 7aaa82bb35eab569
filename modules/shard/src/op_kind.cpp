#include "op_kind.h"

#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <string_view>

namespace ebb::shard {
namespace {

bool writes(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

template <std::size_t kSize>
bool is_one_of(const c10::OperatorHandle& op, const std::array<std::string_view, kSize>& names) {
  return std::find(names.begin(), names.end(), op.schema().name()) != names.end();
}

bool gives_tensors(const c10::FunctionSchema& schema) {
  return !schema.returns().empty() &&
         std::all_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& value) {
           return value.type()->isSubtypeOf(*c10::OptionalType::ofTensor()) ||
                  value.type()->isSubtypeOf(*c10::ListType::ofTensors());
         });
}

} // namespace

OpKind kind_of(const c10::OperatorHandle& op, c10::DeviceType device) {
  const auto& schema = op.schema();
  if (is_one_of<2>(op, {"aten::empty", "aten::empty_strided"}) && schema.overload_name() != "names") {
    return OpKind::kEmpty;
  }
  const bool writing = std::any_of(schema.arguments().begin(), schema.arguments().end(), writes);
  // Their kernels serve all devices but read bytes themselves.
  if (is_one_of<1>(op, {"aten::copy_"})) {
    return OpKind::kWrites;
  }
  if (is_one_of<2>(op, {"aten::convolution", "aten::convolution_backward"})) {
    return OpKind::kMakes;
  }
  const bool view = !writing && std::any_of(schema.returns().begin(), schema.returns().end(), [](const auto& value) {
    return value.alias_info() != nullptr;
  });
  const auto backend = c10::computeDispatchKey(c10::kFloat, c10::kStrided, device);
  const bool has_kernel = op.hasKernelForDispatchKey(backend);
  if (view || op.hasTag(at::Tag::inplace_view) || !has_kernel) {
    return OpKind::kThrough;
  }
  if (writing) {
    return OpKind::kWrites;
  }
  return gives_tensors(schema) ? OpKind::kMakes : OpKind::kReads;
}

bool is_random(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::nondeterministic_seeded);
}

bool overwrites_first(const c10::OperatorHandle& op) {
  return is_one_of<11>(
      op, {"aten::normal_", "aten::uniform_", "aten::zero_", "aten::fill_", "aten::copy_", "aten::random_",
           "aten::exponential_", "aten::log_normal_", "aten::geometric_", "aten::cauchy_", "aten::bernoulli_"});
}

bool is_out(const c10::OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  return std::any_of(arguments.begin(), arguments.end(), [](const c10::Argument& argument) {
    return argument.kwarg_only() && writes(argument);
  });
}

std::optional<std::size_t> index_of(const c10::OperatorHandle& op, std::string_view argument) {
  const auto& arguments = op.schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == argument) {
      return i;
    }
  }
  return std::nullopt;
}

void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& function) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) {
      function(value.toTensor());
    }
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      for_each_tensor(element, function);
    }
  }
}

c10::IValue with_tensors(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& replace) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? c10::IValue(replace(value.toTensor())) : value;
  }
  if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors) {
      tensor = tensor.defined() ? replace(tensor) : tensor;
    }
    return {std::move(tensors)};
  }
  if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::OptionalType) { // Tensor?[]
    c10::List<std::optional<at::Tensor>> tensors;
    for (const c10::IValue& element : value.toListRef()) {
      tensors.push_back(element.isTensor() ? std::optional(replace(element.toTensor())) : std::nullopt);
    }
    return {std::move(tensors)};
  }
  return value;
}

std::vector<at::Tensor> written_of(const c10::OperatorHandle& op, const std::vector<c10::IValue>& inputs) {
  std::vector<at::Tensor> written;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (writes(op.schema().arguments()[i])) {
      for_each_tensor(inputs[i], [&](const at::Tensor& tensor) { written.push_back(tensor); });
    }
  }
  return written;
}

} // namespace ebb::shard
