#pragma once

#include "ebb/comm/work.h"
#include "ebb/shard/replicate.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace ebb::shard {

struct ModuleTree;

// Note [Buckets]
// Gradients are averaged in buckets of neighbouring parameters, last parameter first, as DDP does (Li et al., VLDB 2020).
// The parameters' grads are the bucket's own memory, so that nothing is kept twice. Buckets are reduced in order on all
// ranks; one whose parameters are not all used takes part with zeros, and a vote says which grads exist.

/// Averages the gradients of a replicated model during backward.
class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  Reducer(ReplicateOptions options, const ModuleTree& tree);

  /// Hooks the parameters. Once.
  void attach();
  void reset();
  void enter_no_sync();
  void leave_no_sync();

  const std::vector<std::pair<std::string, at::Tensor>>& named_parameters() const {
    return parameters_;
  }
  const ReplicateOptions& options() const {
    return options_;
  }
  std::string explain() const;

 private:
  struct Slot {
    at::Tensor parameter;
    std::int64_t offset = 0; ///< Elements into the bucket.
    at::Tensor grad; ///< The bucket's memory in the parameter's shape.
    bool used = false;
  };
  struct Bucket {
    std::string name;
    std::vector<Slot> slots;
    at::Tensor memory;
    std::size_t num_ready = 0;
    std::unique_ptr<comm::Work> work;
  };

  void on_gradient(std::size_t bucket, std::size_t slot);
  /// Before a gradient is accumulated: sees that a new backward begins, and whether the last one failed.
  void before_gradient();
  void check_not_unfrozen() const;
  void make_memory(Bucket& bucket);
  void start(Bucket& bucket);
  void finish();
  void clear_round();

  ReplicateOptions options_;
  std::shared_ptr<comm::Communicator> group_;
  std::vector<std::pair<std::string, at::Tensor>> parameters_;
  std::vector<Bucket> buckets_;
  std::size_t num_slots_ = 0;
  std::vector<bool> trained_; ///< By parameter: whether it required a gradient at the start.

  std::recursive_mutex mutex_;
  int no_sync_scopes_ = 0;
  std::size_t next_ = 0; ///< The bucket whose turn it is.
  bool armed_ = false; ///< A backward has begun and its end is queued.
  std::weak_ptr<int> backward_; ///< Held by the queued end of backward; gone when it ran or when backward failed.
};

} // namespace ebb::shard
