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
//
// Where unused buckets are skipped the vote must come before the last reductions. By then ranks may have started
// different numbers of buckets, so it runs over a group of its own. The order stays the same on all ranks: during
// backward a rank starts full buckets only, which the vote will call used.

/// Averages the gradients of a replicated model during backward.
class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  Reducer(ReplicateOptions options, const ModuleTree& tree);

  /// Hooks the parameters. Once.
  void attach();
  void reset();
  void enter_no_sync();
  void leave_no_sync();
  void set_manual_finalization(bool manual);
  void finalize();
  void sync_buffers();

  const std::vector<std::pair<std::string, at::Tensor>>& named_parameters() const {
    return parameters_;
  }
  const ReplicateOptions& options() const {
    return options_;
  }
  std::string explain() const;

 private:
  struct Slot {
    std::string name;
    at::Tensor parameter;
    std::int64_t offset = 0; ///< Elements into the bucket.
    at::Tensor grad; ///< The bucket's memory in the parameter's shape.
    bool used = false;
    bool exists = false; ///< Voted: some rank has a gradient.
    int hits = 0; ///< Gradients that arrived in this backward.
    int expected_hits = 0; ///< With a static graph: as many as in its first step.
  };
  struct Bucket {
    std::string name;
    std::vector<Slot> slots;
    std::int64_t numel = 0;
    at::Tensor memory;
    c10::weak_intrusive_ptr<c10::StorageImpl> released; ///< With lazy allocation: what gradients may still hold.
    std::size_t num_ready = 0;
    int hits = 0;
    int expected_hits = 0;
    std::unique_ptr<comm::Work> work;

    Bucket();
  };

  void plan_buckets();
  void make_memory(Bucket& bucket) const;
  void release_memory(Bucket& bucket) const;
  void on_gradient(std::size_t bucket, std::size_t slot);
  /// Before a gradient is accumulated: sees that a new backward begins, and whether the last one failed.
  void before_gradient();
  void check_not_unfrozen() const;
  bool learned() const {
    return options_.static_graph && learned_;
  }
  bool is_ready(const Bucket& bucket) const;
  void start(Bucket& bucket);
  void start_vote(comm::Communicator& group);
  void take_vote();
  /// The end of backward: starts what is left, and finishes unless somebody else is to.
  void end_backward();
  void finish();
  void check_promise();
  void clear_round();

  ReplicateOptions options_;
  std::shared_ptr<comm::Communicator> group_;
  std::shared_ptr<comm::Communicator> vote_group_; ///< With skip_unused: of its own.
  std::vector<std::pair<std::string, at::Tensor>> parameters_;
  std::vector<std::pair<std::string, at::Tensor>> model_buffers_;
  std::vector<Bucket> buckets_;
  std::size_t num_slots_ = 0;
  std::vector<bool> trained_; ///< By parameter: whether it required a gradient at the start.

  std::recursive_mutex mutex_;
  int no_sync_scopes_ = 0;
  std::size_t next_ = 0; ///< The bucket whose turn it is.
  bool armed_ = false; ///< A backward has begun and its end is queued.
  bool manual_ = false;
  bool ended_ = false; ///< Backward is over and finalize() is not.
  bool learned_ = false; ///< With a static graph: expected_hits and exists are known.
  std::string surprise_; ///< With a static graph: the parameter whose gradient came after its bucket was sent.
  at::Tensor votes_;
  std::unique_ptr<comm::Work> vote_;
  std::weak_ptr<int> backward_; ///< Held by the queued end of backward; gone when it ran or when backward failed.
};

} // namespace ebb::shard
