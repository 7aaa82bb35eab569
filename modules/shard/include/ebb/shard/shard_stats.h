#pragma once

#include <cstdint>

namespace ebb::shard {

/// How many bytes of unsharded parameters may be held, and are. The invariant, checked in test builds:
/// held <= frames + pinned + kept.
struct Residency {
  std::int64_t held_bytes = 0; ///< Unsharded parameters in memory now.
  std::int64_t peak_held_bytes = 0;
  std::int64_t frame_bytes = 0; ///< (frames + prefetch) x largest unit: the allowance.
  std::int64_t pinned_bytes = 0; ///< Beyond the allowance for the running operator.
  std::int64_t kept_bytes = 0; ///< By kShardGradOp, kNoShard, unshard() or a full-parameter scope.
  std::int64_t near_bytes = 0; ///< 1/n of units between forward and backward (integer reshard_after_forward).
  std::int64_t staged_bytes = 0; ///< Copies of offloaded shards that wait for their gather.
  std::int64_t offloaded_bytes = 0; ///< Shards, gradients and optimizer state in the tier of ShardOptions::offload.
};

/// Counts since fully_shard(), or since reset_stats().
struct ShardStats {
  std::int64_t unshards = 0; ///< All-gathers of units.
  std::int64_t prefetched = 0; ///< Of these, started before their first use.
  std::int64_t mispredicted = 0; ///< Prefetched and evicted unused.
  std::int64_t reduces = 0; ///< Reduce-scatters (all-reduces for kNoShard) of units.
  std::int64_t all_reduces = 0; ///< Of units' sharded gradients between copies (hybrid sharding).
  std::int64_t touches = 0; ///< Operators that found their unit resident.
  std::int64_t evictions = 0;
  double wait_seconds = 0; ///< This rank waited for gathers and reductions.
  double comm_seconds = 0; ///< These were under way; what was not waited for was hidden behind compute.
};

} // namespace ebb::shard
