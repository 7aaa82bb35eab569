#pragma once

#include "ebb/comm/work.h"
#include "ebb/shard/fully_shard.h"
#include "frame_pool.h"
#include "unit.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace ebb::shard {

class Engine;
class ResidentSet;

/// One pool of frames and the models that take from it.
struct FrameShare {
  FramePool pool;
  std::vector<ResidentSet*> sets;
};

/// The units that hold unsharded parameters: gathers them into frames, evicts, reshards, and keeps the accounts. Guarded
/// by its engine's lock.
class ResidentSet {
 public:
  explicit ResidentSet(Engine& engine);
  ~ResidentSet();
  ResidentSet(const ResidentSet&) = delete;

  /// Begins to gather a sharded unit that is needed now; evicts another where no frame is free, or goes beyond their
  /// number where all are pinned.
  void gather(Unit& unit);
  /// As gather(), ahead of its use: false, and nothing happens, when no frame can be had for it.
  bool prefetch(Unit& unit);
  /// Gathers a unit in memory of its own, beyond the frames, until it is resharded.
  void gather_kept(Unit& unit);
  /// The same without ShardOptions::gather_hook, for values that are written back. Waits.
  void gather_exactly(Unit& unit);
  /// The whole of a flat parameter in full precision, in memory of its own that the accounts count as kept. Waits.
  at::Tensor gather_full(FlatParameter& flat);
  void give_back_full(const FlatParameter& flat);
  /// Counts a unit that is never sharded (kNoShard).
  void hold_in_place(Unit& unit);

  /// Waits until a unit under way is readable.
  void finish_gather(Unit& unit);
  /// Waits until peers have read what they gather from this rank's shards, which may then be written.
  void release_gathers();
  /// After the operators that have read the unit so far.
  void mark_used(Unit& unit);
  /// Gives the unit's memory back. It must not be pinned.
  /// `keeps_near`: an integer reshard_after_forward keeps its part for backward.
  void reshard(Unit& unit, bool keeps_near = true);
  /// After a failure: the unit's frame is given up if a gather was filling it, and the unit is sharded again.
  void lose(Unit& unit);
  /// Frees what integer reshard_after_forward has kept: at the end of backward, and where the shard changes.
  void drop_near_slices();
  void drop_near_slice(Unit& unit);
  /// After a failed step: forgets gathers and pins, and reshards all but what a full-parameter scope holds.
  void abandon();
  /// Fits the frames to what units need now; nothing may be gathered.
  void refit_frames();
  /// Takes frames from `share`, along with the models that do already; nothing may be gathered.
  void join(const std::shared_ptr<FrameShare>& share);
  const std::shared_ptr<FrameShare>& share() const {
    return share_;
  }

  Residency residency() const;
  void reset_peak() {
    peak_held_bytes_ = held_bytes_;
  }
  int num_frames() const {
    return share_->pool.capacity();
  }
  std::int64_t frame_bytes() const {
    return share_->pool.frame_bytes();
  }

 private:
  std::optional<Frame> frame_for(Unit& unit, bool may_exceed);
  /// `for_unit`: nullptr where another model asks.
  Unit* victim(const Unit* for_unit, std::int64_t needed_sooner_than) const;
  Frame own_frame(Unit& unit);
  bool take_from_others();
  bool give_up_one();
  void leave_share();
  void mark_quietly(Unit& unit) noexcept;
  void start_gather(Unit& unit, Frame frame, bool prefetch);
  void order_before_gather(Unit& unit);
  void keep_near_slice(Unit& unit);
  void add_held(const Unit& unit, bool extra, std::int64_t sign);
  void check_invariant() const;

  Engine& engine_;
  std::shared_ptr<FrameShare> share_;
  std::vector<std::unique_ptr<comm::Work>> unreleased_; ///< Gathers whose input peers may still be reading.
  bool gathers_exactly_ = false;
  std::int64_t held_bytes_ = 0;
  std::int64_t peak_held_bytes_ = 0;
  std::int64_t extra_bytes_ = 0;
  std::int64_t kept_bytes_ = 0;
  std::int64_t near_bytes_ = 0;
};

/// What reading `flat`'s memory says while it has none.
std::string no_data_message(const FlatParameter& flat);

} // namespace ebb::shard
