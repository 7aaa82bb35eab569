#pragma once

#include "ebb/comm/communicator.h"

#include <ATen/core/Tensor.h>

#include <memory>

namespace ebb::shard {

/// Uneven inputs: lets ranks that have run out of batches take part until the last one has (PyTorch's Join). A rank
/// without a batch runs its last batch again with a loss of weight zero, so that it makes the same collectives and adds
/// nothing to the gradients.
///
///   ebb::shard::Join join(mesh.world());
///   while (join.step(batches.has_next())) {
///     if (join.active()) batch = batches.next();
///     join.weighted(loss_of(batch)).backward();
///   }
///
/// Needs a batch on every rank at the first step. Statistics that forward keeps, as batch normalisation does, see the
/// repeated batches.
class Join {
 public:
  /// @param divide_by_active  Average gradients over the ranks that still have batches, instead of over all.
  explicit Join(std::shared_ptr<comm::Communicator> group, bool divide_by_active = false);

  /// Begins a step; false when no rank has a batch left. Collective: every rank calls it, with whether it has a batch.
  /// @throws ValueError at the first step where some ranks have a batch and this one has none.
  bool step(bool has_batch);

  bool active() const {
    return active_;
  }
  int num_active() const {
    return num_active_;
  }
  /// The loss with this rank's weight: itself, or zero times it.
  at::Tensor weighted(const at::Tensor& loss) const;

 private:
  std::shared_ptr<comm::Communicator> group_;
  bool divide_by_active_;
  bool first_ = true;
  bool active_ = false;
  int num_active_ = 0;
};

} // namespace ebb::shard
