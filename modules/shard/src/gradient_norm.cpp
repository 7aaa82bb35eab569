#include "gradient_norm.h"

#include "sync.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>

namespace ebb::shard {

double clip_gradients(
    const std::vector<at::Tensor>& sharded, const std::vector<at::Tensor>& whole, double max_norm, double norm_type,
    comm::Communicator* group) {
  const bool infinite = std::isinf(norm_type) && norm_type > 0;
  TORCH_CHECK_VALUE(
      norm_type == 1 || norm_type == 2 || infinite, "[clip_grad_norm_] expected norm_type 1, 2 or infinity, got ",
      norm_type);
  TORCH_CHECK_VALUE(max_norm > 0, "[clip_grad_norm_] expected max_norm > 0, got ", max_norm);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> grads;
  const auto device = !sharded.empty() ? sharded.front().device()
                      : !whole.empty() ? whole.front().device()
                                       : c10::Device(c10::kCPU);
  // In double, so that the norm does not depend on how the gradients are cut into shards.
  const auto total_of = [&](const std::vector<at::Tensor>& parameters) {
    auto total = at::zeros({1}, at::TensorOptions().dtype(at::kDouble).device(device));
    for (const auto& parameter : parameters) {
      const auto& grad = parameter.grad();
      if (!grad.defined() || grad.numel() == 0) {
        continue;
      }
      grads.push_back(grad);
      const auto norm = at::linalg_vector_norm(grad, norm_type, std::nullopt, false, at::kDouble);
      total = infinite ? at::maximum(total, norm) : total + norm.pow(norm_type);
    }
    return total;
  };
  auto total = total_of(sharded);
  if (group && group->size() > 1 && !sharded.empty()) {
    all_reduce_small(*group, total, infinite ? comm::ReduceOp::kMax : comm::ReduceOp::kSum, "(gradient norm)");
  }
  const auto replicated = total_of(whole);
  total = infinite ? at::maximum(total, replicated) : total + replicated;
  const auto sum = total.item<double>();
  const auto norm = infinite ? sum : std::pow(sum, 1.0 / norm_type);
  const auto scale = max_norm / (norm + 1e-6);
  if (scale < 1.0 || std::isnan(scale)) {
    for (const auto& grad : grads) {
      grad.mul_(scale);
    }
  }
  return norm;
}

} // namespace ebb::shard
