#pragma once

#include "ebb/base/clock.h"
#include "ebb/comm/communicator.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ebb::comm {

/// One collective of this rank, as the flight recorder keeps it.
///
/// Every group that init(), connect(), single() and Mesh make remembers its last 64 collectives. When one of them fails
/// because a peer is lost, late, calls something else, or the group was aborted, this rank writes them once, those of
/// all its groups together: to the file rank<r>.txt of the folder EBB_FLIGHT_RECORDER_DIR, or, where that is not set,
/// the last 8 to the log. With a folder, a rank that aborts, or drops its group because of an exception, writes too.
///
/// EBB_FLIGHT_RECORDER=N keeps N, 0 to 65536; 0 turns it off. A bad value of either variable is a ValueError of the call
/// that makes the group. Cost: some 0.2 us a collective, and no allocation once the ring is full.
struct CollectiveRecord {
  /// How far a collective has come, as far as calls of this rank have told.
  enum class State {
    kStarted, ///< Called; not ended, or nobody has asked its Work yet.
    kDone, ///< Work::wait() or poll() found its output valid. CUDA: valid for what the stream does next.
    kFailed, ///< The call or its Work threw.
    kDropped, ///< Its Work was destroyed before it had ended.
  };

  std::uint64_t number = 0; ///< Counts the collectives of the group from 1: the same at every rank.
  Op op = Op::kBarrier;
  std::string unit{}; ///< Empty for barrier and exchange.
  std::int64_t bytes = 0; ///< Of the tensor, or text, that this rank gives.
  at::ScalarType dtype = at::kByte; ///< Of that tensor; kByte for barrier and exchange.
  std::int64_t step = 0; ///< As last set on any group of this rank.
  std::string group{}; ///< "world", or the name of the group that Mesh split off it.
  int group_size = 1;
  State state = State::kStarted;
  Clock::TimePoint started{};
  double seconds = 0; ///< From the call to its end; to now where it has not ended.
};
/// "started", "done", ...
std::string_view name_of(CollectiveRecord::State state);

/// The last collectives of `group` at this rank, oldest first; empty where the flight recorder is off. Not collective;
/// from any thread, so that a rank that hangs can be asked from another one.
std::vector<CollectiveRecord> flight_record(const Communicator& group);

} // namespace ebb::comm
