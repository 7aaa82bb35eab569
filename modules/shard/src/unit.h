#pragma once

#include "ebb/comm/communicator.h"
#include "flat_parameter.h"
#include "frame_pool.h"
#include "streams.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace ebb::shard {

/// Where a unit's unsharded parameters are.
enum class Residence {
  kSharded, ///< Nowhere: only the shards use memory.
  kGathering, ///< In a frame that an all-gather is filling.
  kResident, ///< In a frame, readable.
};

/// The parameters gathered and reduced together (FSDP's unit): those of one wrapped module.
struct Unit {
  int index = 0;
  std::string name; ///< Of the wrapped module; "(root)" for the root.
  std::vector<std::unique_ptr<FlatParameter>> flats;
  std::int64_t bytes = 0; ///< Of all flats, unsharded, as operators see them.
  std::int64_t reduce_bytes = 0; ///< Of all trainable flats' gradients in the reduction's dtype.

  std::shared_ptr<comm::Communicator> group; ///< Over which it is sharded; a group of one where it is whole.
  bool whole = false; ///< Every rank holds all of it.
  bool in_place = false; ///< Whole and computed with in its own dtype: never gathered.
  bool reshard_after_forward = true;
  bool reshard_after_backward = true;
  std::shared_ptr<comm::Communicator> near_group; ///< For an integer reshard_after_forward: gathers backward's copy.
  std::vector<int> forward_prefetch; ///< Explicit; empty: as predicted.
  std::vector<int> backward_prefetch;
  bool keep_storage = false; ///< Gathered into `own_memory`, which stays.
  bool in_scope = false; ///< Of full_parameters().
  bool sync = true; ///< Whether backward reduces its gradients.
  bool all_reduce = true; ///< Whether it also reduces them over the copies of its shards.

  Residence residence = Residence::kSharded;
  std::optional<Frame> frame;
  at::Tensor own_memory; ///< uint8; of a unit that keeps its storage, from its first gather on.
  std::vector<std::unique_ptr<comm::Work>> gathers; ///< Under way.
  int pins = 0; ///< Operators that are using it now.
  bool kept = false; ///< Not in one of the frames: kept by its strategy or a full-parameter scope.
  bool prefetched = false; ///< Gathered ahead and not used since.
  bool held = false; ///< By ShardedModel::unshard(): not evicted.
  // See Note [Streams].
  Mark ready; ///< The newest gather.
  Mark near_ready; ///< The flats' near slices.
  bool use_unmarked = false; ///< Operators have read the frame since frame->used was recorded.
  bool shard_written = true; ///< Since the gather lane has followed compute.

  std::int64_t last_use = 0; ///< Tick of the newest visit, for least-recently-used.

  // Reduction state of one backward.
  std::int64_t num_trainable = 0;
  std::int64_t num_ready = 0; ///< Members whose gradient is complete.
  std::int64_t pending_bytes = 0; ///< Of gradients not yet copied to the reduce buffer.
  bool reduced = false; ///< Its reduction was started in this backward.

  /// Gives each flat parameter its place in the frame; for the dtypes that they have now.
  void place_in_frame() {
    bytes = 0;
    for (auto& flat : flats) {
      flat->frame_offset = bytes;
      bytes += (flat->padded_bytes() + 63) / 64 * 64;
    }
  }
};

} // namespace ebb::shard
