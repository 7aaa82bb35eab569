#include "ebb/base/progress.h"

#include <fmt/core.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <iostream>

namespace ebb {
namespace {

constexpr int kBarCells = 20;
constexpr int kLeastWidth = 20;
constexpr int kUsualWidth = 80;

/// The descriptor behind one of the standard streams, -1 for any other.
int descriptor_of(const std::ostream& out) {
  if (&out == &std::cerr || &out == &std::clog) {
    return STDERR_FILENO;
  }
  return &out == &std::cout ? STDOUT_FILENO : -1;
}

bool is_terminal(const std::ostream& out) {
  const int fd = descriptor_of(out);
  return fd >= 0 && ::isatty(fd) == 1;
}

int width_of(const std::ostream& out) {
  winsize size{};
  const int fd = descriptor_of(out);
  return fd >= 0 && ::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col >= kLeastWidth ? size.ws_col : kUsualWidth;
}

std::string duration(double seconds) {
  const auto whole = static_cast<std::int64_t>(std::llround(std::min(seconds, 1e9)));
  return whole >= 3600 ? fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60)
                       : fmt::format("{}:{:02}", whole / 60, whole % 60);
}

std::string speed(double per_second) {
  return per_second >= 10  ? fmt::format("{:.0f}", per_second)
         : per_second >= 1 ? fmt::format("{:.1f}", per_second)
                           : fmt::format("{:.2g}", per_second);
}

} // namespace

Progress::Progress(std::int64_t total, std::string unit, std::ostream& out, const ProgressOptions& options)
    : total_(std::max<std::int64_t>(total, 0)),
      unit_(std::move(unit)),
      out_(out),
      terminal_(options.terminal.value_or(is_terminal(out))),
      width_(options.width > 0 ? std::max(options.width, kLeastWidth) : width_of(out)),
      options_(options),
      clock_(options.clock ? *options.clock : Clock::real()),
      began_(clock_.now()),
      next_(began_ + (terminal_ ? options.quiet : std::max(options.quiet, options.line))) {}

Progress::Progress(std::int64_t total, std::string unit, const ProgressOptions& options)
    : Progress(total, std::move(unit), std::cerr, options) {}

Progress::~Progress() {
  finish();
}

void Progress::update(std::int64_t done, std::string_view suffix) {
  done_ = done;
  suffix_ = suffix;
  const auto now = clock_.now();
  if (!finished_ && now >= next_) {
    show(now, false);
  }
}

void Progress::finish() {
  if (finished_) {
    return;
  }
  const auto now = clock_.now();
  if (shown_ || now - began_ > options_.quiet) {
    show(now, true);
  }
  finished_ = true;
}

void Progress::show(Clock::TimePoint now, bool last) {
  const auto line = text(seconds_between(began_, now), last);
  // The cursor is left at the start of the line, so that a log line overwrites the bar instead of hanging on to it.
  out_ << (terminal_ ? "\r\x1b[K" : "") << line << (terminal_ && !last ? "\r" : "\n");
  out_.flush();
  shown_ = true;
  next_ = now + (terminal_ ? options_.redraw : options_.line);
}

std::string Progress::text(double seconds, bool last) const {
  std::string line;
  const double share = total_ > 0 ? std::clamp(static_cast<double>(done_) / static_cast<double>(total_), 0.0, 1.0) : 0;
  if (total_ > 0) {
    if (terminal_) {
      const auto cells = static_cast<std::size_t>(share * kBarCells);
      line += '[' + std::string(cells, '#') + std::string(kBarCells - cells, '-') + "] ";
    }
    line += fmt::format("{:3}% {}/{} {}", static_cast<int>(share * 100), done_, total_, unit_);
  } else {
    line += fmt::format("{} {}", done_, unit_);
  }
  const double per_second = seconds > 0 ? static_cast<double>(done_) / seconds : 0;
  if (per_second > 0) {
    line += fmt::format(", {} {}/s", speed(per_second), unit_);
  }
  if (last) {
    line += ", took " + duration(seconds);
  } else if (total_ > 0 && per_second > 0) {
    line += ", " + duration(static_cast<double>(std::max<std::int64_t>(total_ - done_, 0)) / per_second) + " left";
  }
  if (!suffix_.empty()) {
    line += ", " + suffix_;
  }
  if (terminal_ && line.size() > static_cast<std::size_t>(width_ - 1)) {
    line.resize(
        static_cast<std::size_t>(width_ - 1)); // a longer one would wrap, and each redraw take a line of its own
  }
  return line;
}

} // namespace ebb
