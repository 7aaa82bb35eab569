#pragma once

#include "ebb/shard/activation_offload.h"
#include "offload.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

namespace ebb::shard {

/// One tensor that an ActivationStore keeps.
struct SavedActivation {
  std::shared_ptr<ActivationStore> store;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  at::TensorOptions options;
  at::Tensor place; ///< In the tier, of `sizes` and `strides`. Undefined once backward has taken it for good.
  at::Tensor source; ///< While it is being copied to its place.
  std::uint32_t version = 0; ///< Of the source when the copy began.
  std::shared_ptr<Copy> leaving; ///< From the source to the place.
  bool overwritten = false; ///< The source was written to while it was copied.
  at::Tensor back; ///< Fetched and not yet taken.
  std::shared_ptr<Copy> returning; ///< From the place to `back`.
  std::list<SavedActivation*>::iterator position;

  ~SavedActivation();
};

/// What an ActivationOffload does.
class ActivationStore : public std::enable_shared_from_this<ActivationStore> {
 public:
  explicit ActivationStore(ActivationOffloadOptions options) : options_(std::move(options)) {}

  /// Begins to copy `tensor` to the tier. nullptr: it stays where it is.
  std::shared_ptr<SavedActivation> save(const at::Tensor& tensor);
  /// Its values, on the device it came from. `last`: nobody will ask again.
  /// @throws ValueError when it was written to in between, or taken for good before.
  at::Tensor take(SavedActivation& saved, bool last);
  ActivationOffloadStats stats() const;

 private:
  friend struct SavedActivation;
  void forget(SavedActivation& saved);
  void drop(SavedActivation& saved);
  void note_writes(SavedActivation& saved);
  void settle(SavedActivation& saved);
  void fetch(SavedActivation& saved);
  void fetch_before(const SavedActivation& saved);

  const ActivationOffloadOptions options_;
  mutable std::mutex mutex_;
  // The rest is guarded by mutex_.
  std::unique_ptr<Tier> tier_; ///< Made for the device of the first tensor.
  std::list<SavedActivation*> order_; ///< As they were saved; backward takes them from the end.
  ActivationOffloadStats stats_;
};

} // namespace ebb::shard
