#pragma once

#include "ebb/comm/communicator.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>

namespace torch::optim {
class Optimizer;
} // namespace torch::optim

namespace ebb::shard {

/// As torch.amp.GradScaler's arguments, with its defaults.
struct GradScalerOptions {
  double init_scale = 65536.0; ///< > 0
  double growth_factor = 2.0; ///< > 1; applied after growth_interval steps without overflow.
  double backoff_factor = 0.5; ///< In (0, 1); applied after a step with overflow.
  std::int64_t growth_interval = 2000; ///< >= 1
  bool enabled = true; ///< Off: every call passes through.
};

/// What a checkpoint keeps of a scaler.
struct GradScalerState {
  double scale = 0;
  std::int64_t growth_tracker = 0; ///< Steps without overflow since the scale changed.
};

/// Loss scaling for float16 training on sharded gradients (FSDP paper, section 4.4). An overflow in any rank's shard
/// reaches every rank, so that all skip the same steps and keep the same scale; a scaler per rank would let them part.
///
///   scaler.scale(loss).backward();
///   scaler.unscale_(optimizer); // only where gradients are clipped or read
///   scaler.step(optimizer);
///   scaler.update();
class ShardedGradScaler {
 public:
  /// @param group  The ranks that hold parts of the model: mesh.world().
  /// @throws ValueError for options out of range.
  explicit ShardedGradScaler(std::shared_ptr<comm::Communicator> group, const GradScalerOptions& options = {});

  /// The loss times the scale, in the loss's dtype (float16 losses become float32).
  at::Tensor scale(const at::Tensor& loss) const;

  /// Divides the optimizer's gradients by the scale and finds out whether any rank's overflowed. Collective; once a step.
  /// @throws ValueError when called twice for one step.
  void unscale_(torch::optim::Optimizer& optimizer);

  /// Unscales unless that was done, and steps unless a gradient of any rank was infinite or NaN. Collective.
  /// @return Whether the optimizer stepped: the same on all ranks.
  bool step(torch::optim::Optimizer& optimizer);

  /// Ends the step: shrinks the scale after an overflow, grows it after growth_interval steps without one.
  /// @param new_scale  Sets the scale instead.
  void update(std::optional<double> new_scale = std::nullopt);

  double get_scale() const {
    return options_.enabled ? state_.scale : 1.0;
  }
  GradScalerState state() const {
    return state_;
  }
  /// Goes on from a state that was kept. @throws ValueError for one that no scaler can have.
  void load_state(const GradScalerState& state);

 private:
  enum class Stage { kUnscaled, kStepped };
  struct PerOptimizer {
    Stage stage = Stage::kUnscaled;
    bool found_inf = false;
  };

  std::shared_ptr<comm::Communicator> group_;
  GradScalerOptions options_;
  GradScalerState state_;
  std::unordered_map<torch::optim::Optimizer*, PerOptimizer> seen_; ///< In this step.
};

} // namespace ebb::shard

namespace ebb {
using shard::ShardedGradScaler;
} // namespace ebb
