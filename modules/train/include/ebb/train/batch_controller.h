#pragma once

#include "ebb/comm/communicator.h"
#include "ebb/train/batch_schedule.h"
#include "ebb/train/gradient_noise.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace ebb::train {

/// What BatchStage::from counts.
enum class BatchClock {
  kSteps,
  kTokens, ///< Of all ranks, as told to BatchController::step_done().
};

/// Growth by the gradient noise scale: the global batch is multiplied by `factor` when the noise scale has reached
/// the batch that this gives, at most once in `patience` measured steps.
struct NoiseGrowth {
  std::int64_t max_global_batch = 1; ///< Never above; at least the first global batch.
  std::int64_t factor = 2; ///< At least 2.
  std::int64_t patience = 20; ///< Measured steps before the first growth and after each; at least 1.
  double decay = 0.95; ///< Of the moving averages: GradientNoise.
};

/// What a BatchController is to do: keep the batch, or follow a schedule, or the noise scale.
struct BatchOptions {
  std::int64_t global_batch = 1; ///< Of the first step. A multiple of the ranks, as all batches.
  std::int64_t max_micro_batch = 1; ///< That a rank can take at once; the smallest of the ranks' counts.
  std::vector<BatchStage> schedule = {};
  BatchClock clock = BatchClock::kSteps;
  std::optional<NoiseGrowth> noise = {};
};

/// Squared norms of one step's gradients, for NoiseGrowth.
struct GradientNorms {
  /// Of this rank's gradient before reduction: LocalGradientNorm::take(). Averaged over the ranks.
  double small_squared = 0;
  /// Of the reduced gradient, before clipping: the square of what clip_grad_norm_() returns. Of the mean over
  /// the ranks: where ShardOptions::gradient_divide_factor is not their number, undo that first.
  double big_squared = 0;
  /// Samples behind the first; 0 for the rank's whole part of the step, as with no_sync().
  std::int64_t small_batch = 0;
};

/// Where a BatchController stands. Plain numbers, the same on all ranks: to be saved with a checkpoint.
struct BatchState {
  std::int64_t steps = 0;
  std::int64_t tokens = 0;
  std::int64_t global_batch = 1;
  std::int64_t max_micro_batch = 1;
  std::int64_t measured_since_growth = 0;
  GradientNoise::State noise = {};
};

/// Chooses the global batch of each step, and how it is cut into micro-batches.
///
/// The global batch depends on the options, on what was done and measured, and never on the micro-batch; with the loss
/// divided by plan().accumulate (or token_scale()) the gradient of a step does not depend on the cut either, but for
/// rounding. All ranks have the same plan.
///
/// One step: read plan(), do its micro-steps, step the optimizer, call step_done().
class BatchController {
 public:
  /// Collective; one small exchange.
  /// @throws ValueError for options out of range: naming the field; IncompatibleStateError on every rank when the ranks'
  ///         options differ in more than max_micro_batch.
  BatchController(BatchOptions options, std::shared_ptr<comm::Communicator> world);

  /// Of the next step.
  const BatchPlan& plan() const {
    return plan_;
  }

  /// After a step whose gradients were not measured. Not collective.
  /// @param tokens  Of the step, over all ranks; only BatchClock::kTokens looks at it.
  void step_done(std::int64_t tokens = 0);

  /// After a step whose gradients were measured, with BatchOptions::noise. A step whose norms are not finite counts as
  /// not measured. Collective; one small exchange.
  /// @throws ValueError without BatchOptions::noise; when the step had one batch size only (one rank, and small_batch
  ///         not below its part).
  void step_done(std::int64_t tokens, const GradientNorms& norms);

  /// Lets micro-batches be larger or smaller from the next step on: the smallest of what the ranks say, for instance
  /// what largest_micro_batch() found. Collective; one small exchange.
  void set_max_micro_batch(std::int64_t max_micro_batch);

  /// The estimate so far; without BatchOptions::noise it stays empty.
  const GradientNoise& noise() const {
    return noise_;
  }

  BatchState state() const; ///< What load() takes.
  /// Goes on from `state`: the plans that follow are those of a run without a break. Not collective.
  /// @throws IncompatibleStateError for a state that a controller with these options cannot be in.
  void load(const BatchState& state);

 private:
  std::int64_t scheduled(std::int64_t steps, std::int64_t tokens) const;
  bool can_grow_to(std::int64_t global_batch) const;
  void count(std::int64_t tokens);
  void grow();

  BatchOptions options_;
  std::shared_ptr<comm::Communicator> world_;
  GradientNoise noise_;
  std::int64_t steps_ = 0;
  std::int64_t tokens_ = 0;
  std::int64_t measured_since_growth_ = 0;
  BatchPlan plan_;
};

} // namespace ebb::train
