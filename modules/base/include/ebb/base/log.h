#pragma once

#include <fmt/core.h>

#include <string_view>

/// The one logger. Lines go to stderr as `[time] [level] [rank r] text`, without the rank where none was set, as in a
/// program that starts ranks and is none. EBB_LOG=debug|info|warn|error|off sets the level (info by default). Formats
/// are {fmt}'s.
namespace ebb::log {

/// How much a line matters; kOff as a level silences all.
enum class Level { kDebug, kInfo, kWarn, kError, kOff };

/// Rank shown in every line of this thread. Ranks may be threads of one process, so it is kept per thread; threads that
/// never set it show the rank that the first caller set for the process. -1 takes both back.
void set_rank(int rank);
/// What lines of this thread show; -1 when no thread has set a rank.
int rank();

/// Lines below `level` are dropped from now on, in the whole process. Overrides EBB_LOG.
void set_level(Level level);
/// Whether a line of this level would be written. Ask before computing something only to log it.
bool enabled(Level level);
/// Writes one line as it is.
void emit(Level level, std::string_view text);

/// Takes lines in place of stderr.
using Sink = void (*)(Level level, int rank, std::string_view text);
/// Sends lines to `sink` instead of stderr until called with nullptr. For tests.
void set_sink(Sink sink);

/// Formats and writes one line, if its level is enabled.
template <class... Args>
void write(Level level, fmt::format_string<Args...> format, Args&&... args) {
  if (enabled(level)) {
    emit(level, fmt::format(format, std::forward<Args>(args)...));
  }
}
/// What each rank does, step by step: unshards, reductions, bytes.
template <class... Args>
void debug(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::kDebug, format, std::forward<Args>(args)...);
}
/// What a user wants to know about a run that goes well.
template <class... Args>
void info(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::kInfo, format, std::forward<Args>(args)...);
}
/// Something is off, and the work goes on as asked.
template <class... Args>
void warn(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::kWarn, format, std::forward<Args>(args)...);
}
/// Something failed. What can be thrown is thrown instead.
template <class... Args>
void error(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::kError, format, std::forward<Args>(args)...);
}

} // namespace ebb::log
