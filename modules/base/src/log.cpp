#include "ebb/base/log.h"

#include "log_sink.h"

#include <atomic>

namespace ebb::log {
namespace {

std::atomic<int> process_rank{-1};
thread_local int thread_rank = -1;
std::atomic<Sink> test_sink{nullptr};

} // namespace

void set_rank(int rank) {
  thread_rank = rank;
  if (rank < 0) {
    process_rank = -1;
    return;
  }
  int none = -1;
  process_rank.compare_exchange_strong(none, rank);
}

int rank() {
  return thread_rank >= 0 ? thread_rank : process_rank.load();
}

void set_level(Level level) {
  detail::sink_set_level(static_cast<int>(level));
}

bool enabled(Level level) {
  return detail::sink_should_log(static_cast<int>(level));
}

void emit(Level level, std::string_view text) {
  if (const auto sink = test_sink.load()) {
    sink(level, rank(), text);
  } else if (rank() >= 0) {
    detail::sink_write(static_cast<int>(level), fmt::format("[rank {}] {}", rank(), text));
  } else {
    detail::sink_write(static_cast<int>(level), text);
  }
}

void set_sink(Sink sink) {
  test_sink = sink;
}

} // namespace ebb::log
