#pragma once

#include "offload.h"
#include "streams.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace ebb::shard {

struct FlatParameter;
struct Unit;

// Note [Offload]
// An offloaded shard is read from the device twice a step: each time it is copied there first, and gathered from the
// copy. Copies of the units expected next begin while others compute, one unit beyond those that are gathered ahead. The
// copy lives until peers have read it; a write to the shard, by an optimizer, waits for copies of it and drops them.
// Gradients go the other way, from the reduction's output to the tier, and are waited for at the end of backward.
// Copies on the device are memory of the gather lane, and gradients that are copied that of the reduction lane.

/// The copies of offloaded shards on their way to a gather, and of gradients on their way back. Does nothing where there
/// is no tier. Guarded by its engine's lock.
class ShardStage {
 public:
  ShardStage(std::shared_ptr<Tier> tier, const Streams& streams) : tier_(std::move(tier)), streams_(streams) {}

  const std::shared_ptr<Tier>& tier() const {
    return tier_;
  }
  /// Begins to copy the unit's shards to the device. false: that has begun already.
  bool fetch(const Unit& unit);
  /// The shard on the device. Waits, and forgets the copy: the caller has it.
  at::Tensor take(const FlatParameter& flat);
  /// Waits for copies of the unit's shards and forgets them.
  void drop(const Unit& unit);
  void drop_all();

  /// Begins to copy a gradient to the tier. In the reduction lane.
  void store(const at::Tensor& to, const at::Tensor& from);
  void finish_stores();

  /// After a failed step: forgets everything, and what went wrong with it.
  void abandon() noexcept;

  /// Units with a copy that was not taken.
  int units() const;
  /// Of copies of shards, fetched and not yet taken.
  std::int64_t bytes() const {
    return bytes_;
  }

 private:
  struct Staged {
    at::Tensor shard;
    std::shared_ptr<Copy> copy;
  };
  void drop(const FlatParameter& flat);

  std::shared_ptr<Tier> tier_;
  const Streams& streams_;
  std::unordered_map<const FlatParameter*, Staged> staged_;
  std::unordered_map<const FlatParameter*, std::shared_ptr<Copy>> taken_; ///< May still be reading the shard.
  std::vector<std::shared_ptr<Copy>> stores_;
  std::int64_t bytes_ = 0;
};

} // namespace ebb::shard
