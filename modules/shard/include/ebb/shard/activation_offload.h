#pragma once

#include "ebb/shard/offload.h"

#include <cstdint>
#include <memory>

namespace ebb::shard {

class ActivationStore;

/// Where checkpoint() keeps its inputs between forward and backward, and which of them.
struct ActivationOffloadOptions {
  /// The default is page-locked host memory, for activations on an accelerator; on the CPU take OffloadTier::kFile.
  OffloadPolicy policy = {};
  /// Smaller inputs stay where they are.
  std::int64_t min_bytes = 64 << 10;
};

/// Bytes and tensors since the ActivationOffload was made.
struct ActivationOffloadStats {
  std::int64_t stored_bytes = 0; ///< Copied to the tier.
  std::int64_t fetched_bytes = 0; ///< Copied back.
  std::int64_t live_bytes = 0; ///< In the tier now.
  std::int64_t fetched = 0; ///< Tensors copied back.
  std::int64_t fetched_ahead = 0; ///< Of these, the ones whose way back began before backward asked for them.
};

/// Takes the inputs of checkpoints out of memory while they are not used (PyTorch's offload_wrapper over its
/// checkpoint_wrapper): copied to the tier while the checkpointed function runs, and back, one checkpoint ahead, while
/// backward goes on. Give one object to all checkpoints of a model: they fetch for each other. At most two inputs are
/// in memory that a model without it would not need; values are the same, bit for bit.
///
/// Safe to use from the threads of a backward. Not collective. Costs two copies of each input.
class ActivationOffload {
 public:
  explicit ActivationOffload(ActivationOffloadOptions options = {});
  ~ActivationOffload();
  ActivationOffload(const ActivationOffload&) = delete;
  ActivationOffload& operator=(const ActivationOffload&) = delete;

  /// What it has done so far.
  ActivationOffloadStats stats() const;
  /// For checkpoint().
  ActivationStore& store() const {
    return *store_;
  }

 private:
  std::shared_ptr<ActivationStore> store_;
};

} // namespace ebb::shard
