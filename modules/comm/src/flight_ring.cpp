#include "flight_ring.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace ebb::comm {

std::string_view name_of(CollectiveRecord::State state) {
  switch (state) {
    case CollectiveRecord::State::kStarted:
      return "started";
    case CollectiveRecord::State::kDone:
      return "done";
    case CollectiveRecord::State::kFailed:
      return "failed";
    case CollectiveRecord::State::kDropped:
      return "dropped";
  }
  return "unknown";
}

FlightRing::FlightRing(std::string group, int group_size, int capacity, const Clock& clock)
    : group_(std::move(group)), clock_(clock), slots_(static_cast<std::size_t>(capacity)) {
  TORCH_INTERNAL_ASSERT(capacity > 0, "a ring of ", capacity, " collectives");
  for (auto& record : slots_) {
    record.group = group_;
    record.group_size = group_size;
  }
}

std::uint64_t FlightRing::begin(
    Op op, std::string_view unit, std::int64_t bytes, at::ScalarType dtype, std::int64_t step) {
  const auto now = clock_.now();
  const std::lock_guard lock(mutex_);
  auto& record = slot(++last_);
  record.number = last_;
  record.op = op;
  record.unit = unit; // Into the memory of the one before.
  record.bytes = bytes;
  record.dtype = dtype;
  record.step = step;
  record.state = State::kStarted;
  record.started = now;
  record.seconds = 0;
  return last_;
}

void FlightRing::end(std::uint64_t number, State state) {
  const auto now = clock_.now();
  const std::lock_guard lock(mutex_);
  if (auto& record = slot(number); record.number == number) {
    record.state = state;
    record.seconds = seconds_between(record.started, now);
  }
}

void FlightRing::withdraw(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  if (number == last_) {
    slot(number).number = 0;
    --last_;
  }
}

std::vector<CollectiveRecord> FlightRing::records() const {
  const auto now = clock_.now();
  const std::lock_guard lock(mutex_);
  std::vector<CollectiveRecord> found;
  for (const auto& record : slots_) {
    if (record.number != 0) {
      found.push_back(record);
      if (record.state == State::kStarted) {
        found.back().seconds = seconds_between(record.started, now);
      }
    }
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.number < b.number; });
  return found;
}

} // namespace ebb::comm
