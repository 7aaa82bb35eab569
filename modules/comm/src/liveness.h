#pragma once

#include "ebb/comm/init.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace ebb::comm {

/// Who of the group is alive, and what each was last seen doing. One heartbeat thread a rank, on a store client of its
/// own. See Note [Signs of life] in liveness_thread.cpp.
///
/// Methods may be called from any thread.
class Liveness {
 public:
  /// Called once, from a thread of this object, when a peer (or this rank itself, given up by the others) is found
  /// dead; must not block and must not destroy the Liveness.
  using OnLost = std::function<void(int rank, const std::string& why)>;

  /// @param store  Of this group alone: all its ranks pass the same store or prefix, no other group does.
  Liveness(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const GroupOptions& options, OnLost on_lost);
  /// Says goodbye, so that peers do not take a normal end for a death. When an exception is under way it says that.
  ~Liveness();
  Liveness(const Liveness&) = delete;
  Liveness& operator=(const Liveness&) = delete;

  /// This rank begins operation `op` on `unit`. Cheap: the heartbeat thread publishes it. All ranks begin the same
  /// operations in the same order.
  /// @param step  -1: as set by set_step().
  /// @return      The operation's number in this group, from 1.
  std::uint64_t begin(std::string_view op, std::string_view unit, std::int64_t step = -1);
  void set_step(std::int64_t step);

  /// This rank fails: peers learn of it, with `why`, at their next heartbeat. Waits up to a second for that to be sent.
  void fail(const std::string& why) noexcept;

  /// The dead peer, -1 while all live; and why it is thought dead. This rank itself when its peers gave it up.
  int lost_rank() const;
  std::string lost_reason() const;

  /// "rank 2 (alive, last seen 0.4 s ago in all_gather of unit 'layers.3' at step 12)". Asks the store; may take a
  /// second.
  std::string describe(int rank) const;

  /// Waits for `done` (polled) under the rules of the group: warns at options.warn_after with the ranks that have not
  /// arrived and their last operation, throws RankLostError when a peer is lost and TimeoutError at options.timeout.
  /// An exception out of `done` is a broken connection: see broken().
  /// @param sequence  What begin() returned for this operation; 0: the newest.
  void wait(const std::function<bool()>& done, std::string_view op, std::string_view unit, std::uint64_t sequence = 0);

  /// The connection to some peer broke with `cause`. Finds out which peer is lost, which takes until the others'
  /// signs of life run out where no launcher watches, and throws RankLostError naming it.
  [[noreturn]] void broken(std::string_view op, std::string_view unit, const std::string& cause);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

} // namespace ebb::comm
