#pragma once

#include "ebb/shard/comm_hook.h"

#include <cstdint>
#include <memory>

namespace ebb::train {

/// The simple noise scale of a gradient, B_simple = S / |G|^2: the batch beyond which a larger one averages away noise
/// that hardly matters. S is the variance of one sample's gradient summed over its elements, G the true gradient.
///
/// Estimated from squared norms of the gradient at two batch sizes in the same step, each smoothed by an exponential
/// moving average, since the ratio of single estimates is biased and may be negative. Batch sizes may change between
/// updates. In the unit of the batch sizes: samples, or tokens.
/// Source: McCandlish, Kaplan, Amodei et al., An Empirical Model of Large-Batch Training, 2018, appendix A.1.
class GradientNoise {
 public:
  /// All that updates have left behind.
  struct State {
    double squared_gradient = 0; ///< The moving averages, before the correction for their start at 0.
    double noise = 0;
    std::int64_t updates = 0;
  };

  /// @param decay  Of the moving averages, in [0, 1): about 1 / (1 - decay) updates are averaged.
  explicit GradientNoise(double decay = 0.95);

  /// Adds one step.
  /// @param small_squared_norm  |G_small|^2: of the mean gradient of `small_batch` samples; the average over several
  ///        such batches of the step has less variance.
  /// @param big_squared_norm  Of the mean gradient of `big_batch` samples.
  /// @return false where a norm is not finite, as in a step that a gradient scaler skips: nothing is changed.
  /// @throws ValueError unless 0 < small_batch < big_batch and norms are not negative.
  bool update(double small_squared_norm, double small_batch, double big_squared_norm, double big_batch);

  double squared_gradient() const; ///< Estimate of |G|^2; may be negative. NaN before the first update.
  double noise() const; ///< Estimate of S. NaN before the first update.
  /// B_simple; infinite where no gradient can be told from the noise, 0 where there is no noise, NaN before the first
  /// update.
  double scale() const;

  const State& state() const {
    return state_;
  }
  /// @throws ValueError for numbers that no updates leave behind.
  void load(const State& state);

 private:
  double decay_;
  State state_;
};

/// Measures the norm of this rank's own gradient before it is reduced: the small batch of GradientNoise, where the
/// reduced gradient, whose norm ShardedModel::clip_grad_norm_ returns, is the big one.
///
///   ebb::train::LocalGradientNorm local;
///   auto sharded = ebb::fully_shard(model, {.mesh = mesh, .comm_hook = local.hook()});
///
/// Works with every strategy, with gradient accumulation and with copies of shards. Costs one pass over each gradient
/// that is reduced. With a gradient scaler, divide by the square of its scale. Copies are handles to the same one.
class LocalGradientNorm {
 public:
  LocalGradientNorm();

  /// For ShardOptions::comm_hook; measures, then does `next`.
  shard::CommHook hook(shard::CommHook next = shard::reduce_as_is) const;

  /// The squared norm since the last take(), of this rank; begins anew. Call it after the step's last backward.
  /// @param reductions  Backwards since then that reduced gradients. With no_sync() that is 1, and the gradient measured
  ///        is that of all of the rank's samples in the step. Without it, it is the number of micro-steps, each of
  ///        whose losses was divided by that number: then the result is the mean over micro-steps of the squared norm
  ///        of a micro-batch's mean gradient. That is the way to have two batch sizes on one rank.
  /// @throws ValueError when nothing was reduced, or reductions < 1.
  double take(std::int64_t reductions = 1);

 private:
  struct Sum;
  std::shared_ptr<Sum> sum_;
};

} // namespace ebb::train
