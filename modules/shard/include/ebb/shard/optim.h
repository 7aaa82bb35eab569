#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace torch::optim {
class Optimizer;
class OptimizerParamGroup;
struct AdamWOptions;
struct SGDOptions;
} // namespace torch::optim

namespace ebb::shard {

/// torch::optim::AdamW whose step is LibTorch's fused kernel: one pass over each shard instead of about ten. Options,
/// parameter groups, state and its serialisation are those of torch::optim::AdamW, so that the two are interchangeable.
///
/// @param parameters  ShardedModel::parameters(), or a part of them; dense gradients.
/// Exactness: equal to torch::optim::AdamW up to rounding (the kernel orders its multiplications differently).
std::unique_ptr<torch::optim::Optimizer> fused_adamw(
    std::vector<at::Tensor> parameters, const torch::optim::AdamWOptions& options);
/// The same with parameter groups.
std::unique_ptr<torch::optim::Optimizer> fused_adamw(
    std::vector<torch::optim::OptimizerParamGroup> groups, const torch::optim::AdamWOptions& defaults);

/// torch::optim::SGD (momentum, dampening, Nesterov, weight decay) by LibTorch's fused kernel; as fused_adamw().
std::unique_ptr<torch::optim::Optimizer> fused_sgd(
    std::vector<at::Tensor> parameters, const torch::optim::SGDOptions& options);
/// The same with parameter groups.
std::unique_ptr<torch::optim::Optimizer> fused_sgd(
    std::vector<torch::optim::OptimizerParamGroup> groups, const torch::optim::SGDOptions& defaults);

} // namespace ebb::shard
