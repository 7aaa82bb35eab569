#pragma once

#include "ebb/comm/flight_recorder.h"

#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace ebb::comm {

/// The last collectives of one group. Methods may be called from any thread.
class FlightRing {
 public:
  using State = CollectiveRecord::State;

  FlightRing(std::string group, int group_size, int capacity, const Clock& clock);

  /// Notes a call, in place of the oldest one where the ring is full.
  /// @return  Its number.
  std::uint64_t begin(Op op, std::string_view unit, std::int64_t bytes, at::ScalarType dtype, std::int64_t step);
  /// Nothing where the ring has forgotten `number`.
  void end(std::uint64_t number, State state);
  /// The call was refused before anything was sent, so that the other ranks do not count it either.
  void withdraw(std::uint64_t number);

  /// Oldest first.
  std::vector<CollectiveRecord> records() const;
  const std::string& group() const {
    return group_;
  }

 private:
  CollectiveRecord& slot(std::uint64_t number) {
    return slots_[number % slots_.size()];
  }

  const std::string group_;
  const Clock& clock_;
  mutable std::mutex mutex_; ///< Guards the two below.
  std::vector<CollectiveRecord> slots_; ///< A number of 0 says that there is nothing in it.
  std::uint64_t last_ = 0;
};

} // namespace ebb::comm
