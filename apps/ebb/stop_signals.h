#pragma once

#include <functional>

namespace ebb::train {
class TrainJob;
}

namespace ebb::app {

/// While alive, the first SIGTERM, SIGINT or SIGHUP asks `job` to stop after its step; a second one ends the process,
/// as it would without this.
class StopSignals {
 public:
  explicit StopSignals(train::TrainJob& job);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// The signal that came; 0 when none did.
  int received() const;
};

} // namespace ebb::app
