#pragma once

#include "ebb/base/clock.h"

#include <chrono>
#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>

namespace ebb {

/// How a progress bar looks.
struct ProgressOptions {
  std::optional<bool> terminal; ///< Draw a bar rather than print lines; when not given, whether `out` is a terminal.
  int width = 0; ///< Columns of the bar's line, at least 20; 0: the terminal's, 80 when that is not known.
  std::chrono::milliseconds quiet = std::chrono::seconds(2); ///< Nothing is shown for work that ends within.
  std::chrono::milliseconds redraw = std::chrono::milliseconds(100); ///< Between two drawings of the bar.
  std::chrono::milliseconds line = std::chrono::seconds(10); ///< Between two lines where there is no terminal.
  const Clock* clock = nullptr; ///< The real one when not given; must outlive the progress.
};

/// Shows how far a long piece of work has come: a bar with speed and time left on a terminal, else a plain line now and
/// then. Draws only when it is told of progress, so it needs no thread. Whether this rank is the one that shows
/// anything is the caller's matter.
///
///   [########------------]  40% 120/300 steps, 3.1 steps/s, 0:58 left, loss 1.73
///
/// Not thread-safe. update() is cheap when nothing is due: one look at the clock.
class Progress {
 public:
  /// @param total  How much there is to do; 0 when that is not known: then neither bar nor time left is shown.
  /// @param unit   What is counted, in the plural: "steps", "MB".
  /// @param out    Standard error is the usual place. Must outlive the progress.
  Progress(std::int64_t total, std::string unit, std::ostream& out, const ProgressOptions& options = {});
  /// To standard error.
  Progress(std::int64_t total, std::string unit, const ProgressOptions& options = {});
  ~Progress(); ///< finish(), if it was not called.
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// @param done    Of `total`, so far; may pass it.
  /// @param suffix  Put at the end: "loss 1.73". Kept until the next update.
  void update(std::int64_t done, std::string_view suffix = {});

  /// Shows the last state for good, and ends the line, if anything was shown before. Later calls do nothing.
  void finish();

 private:
  void show(Clock::TimePoint now, bool last);
  std::string text(double seconds, bool last) const;

  const std::int64_t total_;
  const std::string unit_;
  std::ostream& out_;
  const bool terminal_;
  const int width_;
  const ProgressOptions options_;
  const Clock& clock_;
  const Clock::TimePoint began_;
  Clock::TimePoint next_;
  std::int64_t done_ = 0;
  std::string suffix_;
  bool shown_ = false;
  bool finished_ = false;
};

} // namespace ebb
