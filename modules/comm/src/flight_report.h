#pragma once

#include "ebb/base/log.h"

#include "environment.h"
#include "flight_ring.h"

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace ebb::comm {

/// What EBB_FLIGHT_RECORDER and EBB_FLIGHT_RECORDER_DIR say.
struct FlightSettings {
  int capacity = 64; ///< Collectives kept a group; 0: off.
  std::string folder{}; ///< Absolute. Empty: reports go to the log.
};
/// Makes the folder where it is not there yet.
/// @throws ValueError for a bad value; names the variable and the value.
FlightSettings flight_settings(const GetEnv& get_env);
/// Of this process's environment.
FlightSettings flight_settings();

/// All groups of one rank, and where their collectives are written when one fails.
class FlightReport {
 public:
  FlightReport(int rank, int size, FlightSettings settings, const Clock& clock);

  /// A ring for another group of this rank.
  std::shared_ptr<FlightRing> add_group(std::string name, int size);
  void set_step(std::int64_t step) {
    step_.store(step, std::memory_order_relaxed);
  }
  std::int64_t step() const {
    return step_.load(std::memory_order_relaxed);
  }

  /// Collective `number` of `ring` threw `error`. Writes at the first failure, later ones follow from it.
  void failed(const FlightRing& ring, std::uint64_t number, const std::exception& error) noexcept;
  /// This rank leaves its groups because it fails, for a reason of its own. Writes to the folder, where there is one and
  /// nothing was written yet.
  void leaving(const std::string& why) noexcept;

 private:
  // Under the mutex.
  std::vector<CollectiveRecord> all_records();
  void write(const std::string& last_line, log::Level level);

  const int rank_;
  const int size_;
  const FlightSettings settings_;
  const Clock& clock_;
  std::atomic<std::int64_t> step_{0};
  std::atomic<bool> failed_{false};
  std::mutex mutex_; ///< Guards those below, and the file.
  /// Those of groups that are gone too, until another one is made: an exception drops groups before anybody looks.
  std::vector<std::shared_ptr<const FlightRing>> rings_;
  bool left_ = false;
};

} // namespace ebb::comm
