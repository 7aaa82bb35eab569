#include "op_flops.h"

#include <torch/torch.h>

#include <functional>
#include <numeric>
#include <string_view>
#include <unordered_map>

namespace ebb::shard {
namespace {

class Arguments {
 public:
  Arguments(const torch::jit::Stack& stack, std::size_t count) : stack_(stack), count_(count) {}
  const c10::IValue& operator[](std::size_t i) const {
    return stack_[stack_.size() - count_ + i];
  }
  at::IntArrayRef sizes(std::size_t i) const {
    return (*this)[i].toTensor().sizes();
  }

 private:
  const torch::jit::Stack& stack_;
  std::size_t count_;
};

std::int64_t product(at::IntArrayRef sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

// [.., M, K] x [.., K, N]
std::int64_t matmul(at::IntArrayRef a, at::IntArrayRef b) {
  return 2 * product(a) * b.back();
}

// Every element of the output is a sum over the input channels of a group and the window.
std::int64_t convolution(at::IntArrayRef output, at::IntArrayRef weight) {
  return 2 * product(output) * product(weight.slice(1));
}

std::int64_t attention(at::IntArrayRef query, at::IntArrayRef key, std::int64_t products) {
  return 2 * products * product(query) * key[2];
}

std::int64_t forward_convolution(const Arguments& in) {
  const bool transposed = in[6].toBool();
  if (transposed) {
    return convolution(in.sizes(0), in.sizes(1)); // the roles of input and output are exchanged
  }
  const auto input = in.sizes(0);
  const auto weight = in.sizes(1);
  const auto stride = in[3].toIntVector();
  const auto padding = in[4].toIntVector();
  const auto dilation = in[5].toIntVector();
  std::vector<std::int64_t> output{input[0], weight[0]};
  for (std::size_t dim = 2; dim < input.size(); ++dim) {
    const auto at = [&](const std::vector<std::int64_t>& values) {
      return values.size() == 1 ? values[0] : values[dim - 2];
    };
    output.push_back((input[dim] + 2 * at(padding) - at(dilation) * (weight[dim] - 1) - 1) / at(stride) + 1);
  }
  return convolution(output, weight);
}

std::int64_t backward_convolution(const Arguments& in) {
  const bool transposed = in[7].toBool();
  const auto mask = in[10].toBoolList();
  const auto once = convolution(transposed ? in.sizes(1) : in.sizes(0), in.sizes(2));
  return once * (static_cast<std::int64_t>(mask.get(0)) + static_cast<std::int64_t>(mask.get(1)));
}

using Formula = std::int64_t (*)(const Arguments&);

const std::unordered_map<std::string_view, Formula>& formulas() {
  static const std::unordered_map<std::string_view, Formula> table{
      {"aten::mm", [](const Arguments& in) { return matmul(in.sizes(0), in.sizes(1)); }},
      {"aten::bmm", [](const Arguments& in) { return matmul(in.sizes(0), in.sizes(1)); }},
      {"aten::addmm", [](const Arguments& in) { return matmul(in.sizes(1), in.sizes(2)); }},
      {"aten::addmm_", [](const Arguments& in) { return matmul(in.sizes(1), in.sizes(2)); }},
      {"aten::_addmm_activation", [](const Arguments& in) { return matmul(in.sizes(1), in.sizes(2)); }},
      {"aten::baddbmm", [](const Arguments& in) { return matmul(in.sizes(1), in.sizes(2)); }},
      {"aten::baddbmm_", [](const Arguments& in) { return matmul(in.sizes(1), in.sizes(2)); }},
      {"aten::mv", [](const Arguments& in) { return 2 * product(in.sizes(0)); }},
      {"aten::addmv", [](const Arguments& in) { return 2 * product(in.sizes(1)); }},
      {"aten::dot", [](const Arguments& in) { return 2 * product(in.sizes(0)); }},
      {"aten::convolution", forward_convolution},
      {"aten::convolution_backward", backward_convolution},
      {"aten::_scaled_dot_product_flash_attention_for_cpu",
       [](const Arguments& in) { return attention(in.sizes(0), in.sizes(1), 2); }},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward",
       [](const Arguments& in) { return attention(in.sizes(1), in.sizes(2), 5); }},
  };
  return table;
}

} // namespace

std::int64_t flops_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto found = formulas().find(op.schema().name());
  return found == formulas().end() ? 0 : found->second(Arguments(stack, op.schema().arguments().size()));
}

} // namespace ebb::shard
