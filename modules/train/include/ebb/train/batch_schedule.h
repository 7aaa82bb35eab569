#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ebb::train {

/// How the samples of one step are cut: micro_batch x accumulate x ranks = global_batch, exactly.
struct BatchPlan {
  std::int64_t global_batch = 1; ///< Samples of one step over all ranks.
  std::int64_t micro_batch = 1; ///< Of them in one forward and backward of one rank.
  std::int64_t accumulate = 1; ///< Forwards and backwards of one rank in the step.
  bool operator==(const BatchPlan&) const = default;
};

/// The plan of `global_batch` with the largest micro-batch up to `max_micro_batch` that divides a rank's part. So that
/// few micro-steps are needed, choose batches with many divisors: a part of 31 with at most 16 a time takes 31 steps.
/// @throws ValueError unless the number of ranks divides global_batch, and all are at least 1.
BatchPlan plan_batch(std::int64_t global_batch, std::int64_t max_micro_batch, int world_size);

/// A global batch, and from when on it is used.
struct BatchStage {
  std::int64_t from = 0; ///< Steps or tokens done before it.
  std::int64_t global_batch = 1;
  bool operator==(const BatchStage&) const = default;
};

/// Stages from texts such as "1000:64": from step 1000 on, 64 samples a step.
/// @throws ValueError for a text of another form; quotes it.
std::vector<BatchStage> parse_batch_schedule(const std::vector<std::string>& texts);

/// @throws ValueError unless stages begin above 0, each later than the last, with batches that `world_size` ranks can
///         share equally.
void check_batch_schedule(const std::vector<BatchStage>& schedule, int world_size);

/// The global batch after `done` steps or tokens: that of the last stage that has begun, else `first`.
std::int64_t scheduled_batch(const std::vector<BatchStage>& schedule, std::int64_t first, std::int64_t done);

} // namespace ebb::train
