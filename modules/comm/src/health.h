#pragma once

#include "ebb/comm/init.h"

#include "liveness.h"
#include "operation.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace ebb::comm {

/// Whether a group still works, and if not, whose fault it is. Shared by a communicator and its Works.
///
/// A group breaks once and for good: a peer is lost, this rank aborts, or a wait times out. Breaking it makes every
/// operation of this rank end, and tells the peers, so that theirs end too.
class Health {
 public:
  /// Cuts the transport, so that waits end. Each is called once, from any thread, and must not block.
  using OnBreak = std::function<void(int rank, const std::string& why)>;

  Health(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const GroupOptions& options);

  /// Called at once where the group is broken already.
  void add_on_break(OnBreak on_break);

  /// Publishes that this rank is in `operation`, and notes its number.
  /// @throws as check().
  void begin(Operation& operation);
  void set_step(std::int64_t step);

  bool broken() const {
    return broken_.load(std::memory_order_acquire);
  }
  /// The first cause wins. @param rank  Who is lost; -1 when only the transport's error is known.
  void break_group(int rank, const std::string& why) noexcept;
  /// This rank leaves because it fails: peers are told why.
  void fail(const std::string& why) noexcept;
  /// @throws RankLostError that names who is lost; asks the signs of life where that is not known yet.
  [[noreturn]] void throw_broken(const Operation& operation);
  void check(const Operation& operation) {
    if (broken()) {
      throw_broken(operation);
    }
  }

  /// Waits until `done_within(limit)`, which may block up to `limit` and throws nothing but ebb::Error, is true. Warns,
  /// times out and finds lost peers as GroupOptions says.
  /// @throws RankLostError, TimeoutError, and what `done_within` throws; the group is broken then.
  void wait(const std::function<bool(std::chrono::milliseconds limit)>& done_within, const Operation& operation);

  /// Says goodbye to the peers. Operations must have ended; what is left is checks of broken().
  void close();

  /// wait() for destructors: gives up without a word where the group breaks.
  void drain(
      const std::function<bool(std::chrono::milliseconds limit)>& done_within, const Operation& operation) noexcept;

 private:
  const int own_rank_;
  const GroupOptions options_;
  std::atomic<bool> broken_{false};
  std::mutex mutex_; ///< Guards the three below.
  std::vector<OnBreak> on_break_;
  int lost_rank_ = -1;
  std::string why_;
  std::unique_ptr<Liveness> liveness_; ///< Last: its thread calls back into this object, so it must end first.
};

} // namespace ebb::comm
