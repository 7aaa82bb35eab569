#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace ebb {

/// How much a job may do before it returns to its driver. The first limit that is reached ends the advance.
struct Budget {
  std::optional<std::int64_t> steps;
  std::optional<double> seconds;
};

/// What a job tells its driver after an advance.
struct JobStatus {
  std::int64_t step = 0; ///< Steps done since the job began, over all advances and resumes.
  bool finished = false; ///< Nothing is left to do.
  std::map<std::string, double> metrics; ///< The newest: "loss", "eval/loss", ...
};

/// A paused job's state. Opaque to drivers; what it holds is the job's own business.
class JobState {
 public:
  virtual ~JobState() = default;
  virtual std::int64_t step() const = 0;
};

/// Work that a driver (tuner, carbon planner, elastic launcher) can run in slices, pause, move and resize.
///
/// On more than one rank every call is collective: each rank's driver makes the same calls in the same order.
class Job {
 public:
  virtual ~Job() = default;

  /// Works until the budget is used or the job is finished.
  virtual JobStatus advance(const Budget& budget) = 0;

  /// The state after the last advance. The job can go on afterwards; the state does not change with it.
  virtual std::shared_ptr<const JobState> pause() = 0;

  /// Goes on from `state`, which a job with the same options made.
  /// @throws IncompatibleStateError when it was not; the job is unchanged.
  virtual void resume(const std::shared_ptr<const JobState>& state) = 0;

  /// Goes on with `world_size` ranks.
  /// @throws c10::NotImplementedError where a job cannot.
  virtual void resize(int world_size) = 0;

  /// Ends the job early and tells its observers. Later advances do nothing and report `finished`.
  virtual void stop() = 0;

  /// One job that runs several configurations side by side (for tuning), or nullptr where the job cannot.
  virtual std::unique_ptr<Job> pack(const std::vector<std::map<std::string, std::string>>& /*configurations*/) {
    return nullptr;
  }
};

} // namespace ebb
