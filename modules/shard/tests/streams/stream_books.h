#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace ebb::shard::test {

/// Two uses of the same bytes of which one is a write, and which no event puts in order.
struct Hazard {
  enum class Kind : std::uint8_t {
    kReadBeforeWrite, ///< A read that may come before the write of what it reads.
    kReuseBeforeLastUse, ///< A write, or the end of a block, that may come before the last use of what was there.
  };
  Kind kind;
  std::string first; ///< "all_gather on nccl": what comes first in the host's order.
  std::string then; ///< "mm on compute"
  std::string text() const;
};

inline constexpr std::size_t kMostStreams = 16;
inline constexpr int kHost = 0;
inline constexpr int kCompute = 1;

/// How much of each stream's work comes before something.
struct VectorClock {
  std::array<std::uint32_t, kMostStreams> ticks{};
  void join(const VectorClock& other) {
    for (std::size_t i = 0; i < kMostStreams; ++i) {
      ticks[i] = std::max(ticks[i], other.ticks[i]);
    }
  }
};

/// A point in the work of the stream `source`.
struct RecordedEvent {
  VectorClock clock;
  int source = kCompute;
};

/// Bytes that an operator uses.
struct Range {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  std::uintptr_t storage_begin = 0;
  std::uintptr_t storage_end = 0;
  bool write = false;
};

/// One use of memory.
struct Access {
  std::uintptr_t begin;
  std::uintptr_t end;
  int stream;
  std::uint32_t tick;
  bool write;
  std::string op;
};

/// A block of memory and what was done to it.
struct Owned {
  std::uintptr_t end;
  int home; ///< The stream it belongs to; the host's is not the device's memory.
  std::vector<Access> accesses;
};

/// The bytes of `tensor`; nothing for one without memory.
std::optional<Range> range_of(const at::Tensor& tensor, bool write);

/// What streams were given, in the host's order, what comes before what, and the hazards so far. Those of this thread are
/// found by here().
class StreamBooks : public std::enable_shared_from_this<StreamBooks> {
 public:
  StreamBooks() = default;
  static StreamBooks*& here();

  int new_stream(const std::string& name);
  int take_from_pool();
  int current() const {
    return current_;
  }
  int exchange(int stream) {
    return std::exchange(current_, stream);
  }

  /// An event at the end of what `stream` has been given.
  void record(RecordedEvent& event, int stream);
  void wait(int waiter, const RecordedEvent& event);

  void allocate(void* data, std::size_t size);
  void free(void* data);
  bool on_device(const at::Tensor& tensor);

  /// Work of one stream.
  void work(const std::string& op, const std::vector<Range>& ranges, int stream);
  /// An operator on the current stream; on the host as far as the memory is the host's.
  void operate(const std::string& op, const std::vector<Range>& ranges, bool non_blocking, bool host_reads);

  bool paused = false; ///< What this thread does is not a stream's work.
  std::set<std::pair<std::string, std::string>> ignored;
  std::int64_t ignored_wait = -1;
  std::map<std::pair<std::string, std::string>, std::int64_t> waits;
  std::int64_t num_waits = 0;
  std::int64_t num_operators = 0;
  std::vector<Hazard> hazards() const;

 private:
  VectorClock& reach(int stream);
  Owned* find(std::uintptr_t at);
  void check(const Owned& block, const Range& range, int stream, const std::string& op);
  void use(const std::string& op, const std::vector<Range>& ranges, int stream);

  mutable std::mutex mutex_; ///< Memory may be dropped by another thread.
  std::vector<Hazard> hazards_;
  std::vector<std::string> names_{"host", "compute"};
  std::array<VectorClock, kMostStreams> clocks_{};
  std::map<std::uintptr_t, Owned> blocks_;
  std::set<std::tuple<Hazard::Kind, std::string, std::string>> seen_;
  std::size_t taken_ = 0;
  int current_ = kCompute;
};

} // namespace ebb::shard::test
