#pragma once

#include <fmt/core.h>

#include <string_view>

/// The one logger. Lines go to stderr as `[time] [rank r] [level] text`. EBB_LOG=debug|info|warn|error|off sets the
/// level (info by default). Formats are {fmt}'s.
namespace ebb::log {

enum class Level { kDebug, kInfo, kWarn, kError, kOff };

/// Rank shown in every line of this thread. Ranks may be threads of one process, so it is kept per thread; threads that
/// never set it show the rank that the first caller set for the process.
void set_rank(int rank);
int rank();

void set_level(Level level);
bool enabled(Level level);
void emit(Level level, std::string_view text);

/// Sends lines to `sink` instead of stderr until called with nullptr. For tests.
using Sink = void (*)(Level level, int rank, std::string_view text);
void set_sink(Sink sink);

template <class... Args>
void write(Level level, fmt::format_string<Args...> format, Args&&... args) {
  if (enabled(level)) {
    emit(level, fmt::format(format, std::forward<Args>(args)...));
  }
}
template <class... Args>
void debug(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::kDebug, format, std::forward<Args>(args)...);
}
template <class... Args>
void info(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::kInfo, format, std::forward<Args>(args)...);
}
template <class... Args>
void warn(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::kWarn, format, std::forward<Args>(args)...);
}
template <class... Args>
void error(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::kError, format, std::forward<Args>(args)...);
}

} // namespace ebb::log
