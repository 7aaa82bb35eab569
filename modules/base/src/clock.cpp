#include "ebb/base/clock.h"

namespace ebb {

const Clock& Clock::real() {
  class RealClock final : public Clock {
    TimePoint now() const override {
      return std::chrono::steady_clock::now();
    }
    std::chrono::system_clock::time_point wall() const override {
      return std::chrono::system_clock::now();
    }
  };
  static const RealClock instance;
  return instance;
}

} // namespace ebb
