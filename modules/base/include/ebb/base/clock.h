#pragma once

#include <chrono>

namespace ebb {

/// Where time comes from. Real by default; scripted in tests.
class Clock {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  virtual ~Clock() = default;
  virtual TimePoint now() const = 0; ///< Monotonic.
  virtual std::chrono::system_clock::time_point wall() const = 0; ///< Calendar time, for records.
  /// The system's clocks.
  static const Clock& real();
};

/// A clock that moves only when told to.
class ScriptedClock : public Clock {
 public:
  TimePoint now() const override {
    return now_;
  }
  std::chrono::system_clock::time_point wall() const override {
    return std::chrono::system_clock::time_point(
        std::chrono::duration_cast<std::chrono::system_clock::duration>(now_.time_since_epoch()));
  }
  /// Moves both times on.
  void advance(std::chrono::nanoseconds by) {
    now_ += by;
  }

 private:
  TimePoint now_{};
};

/// Now, by the system's monotonic clock.
inline Clock::TimePoint steady_now() {
  return std::chrono::steady_clock::now();
}

/// Seconds between two points in time.
inline double seconds_between(Clock::TimePoint from, Clock::TimePoint to) {
  return std::chrono::duration<double>(to - from).count();
}

} // namespace ebb
