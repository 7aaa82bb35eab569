#include "gradient_norm.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>

namespace ebb::shard {

double clip_gradients(
    const std::vector<at::Tensor>& parameters, double max_norm, double norm_type, comm::Communicator* group) {
  const bool infinite = std::isinf(norm_type) && norm_type > 0;
  TORCH_CHECK_VALUE(
      norm_type == 1 || norm_type == 2 || infinite, "[clip_grad_norm_] expected norm_type 1, 2 or infinity, got ",
      norm_type);
  TORCH_CHECK_VALUE(max_norm > 0, "[clip_grad_norm_] expected max_norm > 0, got ", max_norm);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> grads;
  auto device = c10::Device(c10::kCPU);
  for (const auto& parameter : parameters) {
    device = parameter.device();
    if (parameter.grad().defined() && parameter.grad().numel() > 0) {
      grads.push_back(parameter.grad());
    }
  }
  // In double, so that the norm does not depend on how the gradients are cut into shards.
  auto total = at::zeros({1}, at::TensorOptions().dtype(at::kDouble).device(device));
  for (const auto& grad : grads) {
    const auto norm = at::linalg_vector_norm(grad, norm_type, std::nullopt, false, at::kDouble);
    if (infinite) {
      total = at::maximum(total, norm);
    } else {
      total.add_(norm.pow(norm_type));
    }
  }
  if (group && group->size() > 1) {
    group->all_reduce(total, infinite ? comm::ReduceOp::kMax : comm::ReduceOp::kSum, 1, "(gradient norm)")->wait();
  }
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
