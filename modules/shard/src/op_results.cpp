#include "op_results.h"

#include "op_kind.h"

#include <torch/torch.h>

#include <string_view>
#include <unordered_map>
#include <utility>

namespace ebb::shard {
namespace {

using Inputs = std::vector<c10::IValue>;

at::Tensor on_meta(at::IntArrayRef sizes, const at::Tensor& like) {
  return at::empty(sizes, like.options().device(at::kMeta));
}

at::Tensor meta_like(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

at::Tensor contiguous_meta_like(const at::Tensor& tensor) {
  return on_meta(tensor.sizes(), tensor);
}

// LibTorch has meta kernels for these in Python only.

torch::jit::Stack layer_norm(const Inputs& in) {
  const auto& input = in[0].toTensor();
  auto stats = input.sizes().vec();
  for (std::size_t i = 0; i < in[1].toIntVector().size(); ++i) {
    stats[stats.size() - 1 - i] = 1;
  }
  // Statistics of half types are kept as the weights are.
  const auto dtype =
      in[2].isTensor() && in[2].toTensor().defined() ? in[2].toTensor().scalar_type() : input.scalar_type();
  const auto options = input.options().device(at::kMeta).dtype(dtype);
  return {contiguous_meta_like(input), at::empty(stats, options), at::empty(stats, options)};
}

torch::jit::Stack layer_norm_backward(const Inputs& in) {
  const auto mask = in[7].toBoolList();
  const auto part = [&](bool wanted, const c10::IValue& like) {
    return wanted && like.isTensor() && like.toTensor().defined() ? contiguous_meta_like(like.toTensor())
                                                                  : at::Tensor();
  };
  return {part(mask.get(0), in[1]), part(mask.get(1), in[5]), part(mask.get(2), in[6])};
}

torch::jit::Stack embedding_backward(const Inputs& in) {
  const auto& gradient = in[0].toTensor();
  return {on_meta({in[2].toInt(), gradient.size(-1)}, gradient)};
}

torch::jit::Stack index_select(const Inputs& in) {
  const auto& self = in[0].toTensor();
  auto sizes = self.sizes().vec();
  if (!sizes.empty()) {
    sizes[at::maybe_wrap_dim(in[1].toInt(), self.dim())] = in[2].toTensor().numel();
  }
  return {on_meta(sizes, self)};
}

// The CPU's flash attention works in [B, T, H, D].
at::Tensor attended(const at::Tensor& like) {
  return on_meta({like.size(0), like.size(2), like.size(1), like.size(3)}, like).transpose(1, 2);
}

torch::jit::Stack attention(const Inputs& in) {
  const auto& query = in[0].toTensor();
  const auto statistics =
      query.options().device(at::kMeta).dtype(query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  const auto logsumexp = at::empty({query.size(0), query.size(2), query.size(1)}, statistics).transpose(1, 2);
  auto output = attended(query);
  return {output, logsumexp};
}

torch::jit::Stack attention_backward(const Inputs& in) {
  return {attended(in[1].toTensor()), attended(in[2].toTensor()), attended(in[3].toTensor())};
}

using Rule = torch::jit::Stack (*)(const Inputs&);

const std::unordered_map<std::string_view, Rule>& rules() {
  static const std::unordered_map<std::string_view, Rule> table{
      {"aten::native_layer_norm", layer_norm},
      {"aten::native_layer_norm_backward", layer_norm_backward},
      {"aten::embedding_dense_backward", embedding_backward},
      {"aten::index_select", index_select},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", attention},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", attention_backward},
  };
  return table;
}

} // namespace

std::optional<torch::jit::Stack> results_like(const c10::OperatorHandle& op, const std::vector<c10::IValue>& inputs) {
  const at::NoGradGuard no_grad;
  if (const auto rule = rules().find(op.schema().name()); rule != rules().end()) {
    return rule->second(inputs);
  }
  torch::jit::Stack stack;
  for (const auto& input : inputs) {
    stack.push_back(with_tensors(input, [](const at::Tensor& tensor) {
      auto like = meta_like(tensor);
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) { // counts for less in the result's dtype
        like.unsafeGetTensorImpl()->set_wrapped_number(true);
      }
      return like;
    }));
  }
  if (const auto device = index_of(op, "device")) {
    stack[*device] = c10::Device(at::kMeta);
  }
  if (const auto generator = index_of(op, "generator")) {
    stack[*generator] = c10::IValue();
  }
  try {
    op.callBoxed(stack);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
  return stack;
}

torch::jit::Stack results_on_zeros(const c10::OperatorHandle& op, const std::vector<c10::IValue>& inputs) {
  const at::NoGradGuard no_grad;
  torch::jit::Stack stack;
  for (const auto& input : inputs) {
    stack.push_back(with_tensors(input, [](const at::Tensor& tensor) {
      return is_without_memory(tensor) ? at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options()).zero_()
                                       : tensor;
    }));
  }
  op.callBoxed(stack);
  for (auto& value : stack) {
    value = with_tensors(value, meta_like);
  }
  return stack;
}

at::Tensor empty_without_memory(const at::Tensor& like, c10::DataPtr nothing, const std::string& message) {
  const auto device = nothing.device();
  const auto bytes = at::detail::computeStorageNbytes(like.sizes(), like.strides(), like.dtype().itemsize());
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<std::int64_t>(bytes), std::move(nothing),
      c10::GetAllocator(device.type()), /*resizable=*/true);
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(std::move(storage)),
      c10::DispatchKeySet(c10::computeDispatchKey(like.scalar_type(), c10::kStrided, device)), like.dtype());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  return at::Tensor(std::move(impl));
}

std::vector<c10::IValue> inputs_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  return {stack.end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size()), stack.end()};
}

bool is_without_memory(const at::Tensor& tensor) {
  if (!tensor.has_storage()) {
    return false;
  }
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  return storage->nbytes() > 0 && storage->_mutable_data_ptr_no_checks().get() == nullptr;
}

} // namespace ebb::shard
