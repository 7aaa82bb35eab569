#pragma once

#include "ebb/train/train_options.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

namespace ebb::train {

/// An optimizer that changes each element by its own gradient and state alone, so that it may run on shards.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  /// Applies the gradients with this learning rate.
  virtual void step(double learning_rate) = 0;
  /// All that steps have left behind, as bytes; load() of them goes on bit for bit.
  virtual std::string save() const = 0;
  /// @throws c10::Error when the bytes were saved over other parameters.
  virtual void load(const std::string& bytes) = 0;
};

/// The optimizer that options.optimizer names, with LibTorch's defaults for what the options leave open; adamw and sgd
/// with its fused kernels.
/// @throws ValueError for an unknown name, and for "lbfgs", which cannot run on shards.
std::unique_ptr<Optimizer> make_optimizer(const TrainOptions& options, std::vector<at::Tensor> parameters);

} // namespace ebb::train
