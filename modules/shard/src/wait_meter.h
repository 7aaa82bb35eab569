#pragma once

#include "ebb/base/clock.h"
#include "ebb/comm/work.h"

#include <memory>

namespace ebb::shard {

/// How long collectives were under way, and how much of that this rank spent waiting for them: the rest was hidden behind
/// compute. On CUDA, waiting is the stream's, and only the host's part of it is seen.
class WaitMeter {
 public:
  struct Totals {
    double waited = 0; ///< Seconds in wait() and release().
    double under_way = 0; ///< Seconds from the call to the end of the first wait().
  };

  explicit WaitMeter(const Clock& clock) : clock_(&clock) {}

  /// `work`, measured. nullptr stays so.
  std::unique_ptr<comm::Work> measure(std::unique_ptr<comm::Work> work);
  Totals totals() const {
    return *totals_;
  }
  void reset() {
    *totals_ = {};
  }
  /// From here on; for tests. The clock outlives the meter.
  void use(const Clock& clock) {
    clock_ = &clock;
  }

 private:
  const Clock* clock_;
  std::shared_ptr<Totals> totals_ = std::make_shared<Totals>(); ///< Works may outlive their engine.
};

} // namespace ebb::shard
