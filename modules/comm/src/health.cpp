#include "health.h"

#include "failure.h"

#include <thread>

namespace ebb::comm {
namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;

constexpr milliseconds kFirstWait = 200ms; // Most waits end within; no bookkeeping for these.
constexpr milliseconds kSlice = 10ms; // Between looks at who is alive.

} // namespace

Health::Health(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const GroupOptions& options)
    : own_rank_(rank), options_(options) {
  liveness_ = std::make_unique<Liveness>(
      store, rank, size, options, [this](int lost, const std::string& why) { break_group(lost, why); });
}

void Health::add_on_break(OnBreak on_break) {
  std::unique_lock lock(mutex_);
  on_break_.push_back(on_break);
  if (broken_.load()) {
    const int rank = lost_rank_;
    const auto why = why_;
    lock.unlock();
    on_break(rank, why);
  }
}

void Health::begin(Operation& operation) {
  check(operation);
  operation.watch_number = liveness_->begin(name_of(operation.op), operation.unit, operation.step);
}

void Health::set_step(std::int64_t step) {
  liveness_->set_step(step);
}

void Health::break_group(int rank, const std::string& why) noexcept {
  std::vector<OnBreak> on_break;
  {
    const std::lock_guard lock(mutex_);
    if (broken_.load()) {
      return;
    }
    lost_rank_ = rank;
    why_ = why;
    on_break = on_break_;
    broken_.store(true, std::memory_order_release);
  }
  for (const auto& call : on_break) {
    call(rank, why);
  }
}

void Health::fail(const std::string& why) noexcept {
  if (!broken() && liveness_) {
    liveness_->fail(why);
  }
  break_group(own_rank_, why);
}

void Health::throw_broken(const Operation& operation) {
  int rank = -1;
  std::string why;
  {
    const std::lock_guard lock(mutex_);
    rank = lost_rank_;
    why = why_;
  }
  if (rank < 0 && liveness_) {
    // A broken connection says that somebody is lost, not who: the one at its other end may itself have given up
    // because of a third. The signs of life tell.
    try {
      liveness_->broken(name_of(operation.op), operation.unit, why);
    } catch (const RankLostError& error) {
      const std::lock_guard lock(mutex_);
      if (error.rank() >= 0) {
        lost_rank_ = error.rank();
        why_ = liveness_->lost_rank() == error.rank() ? liveness_->lost_reason() : "it left the group";
      }
      throw;
    }
  }
  throw_rank_lost(operation, rank, why);
}

void Health::wait(const std::function<bool(milliseconds)>& done_within, const Operation& operation) {
  try {
    if (done_within(kFirstWait)) {
      return;
    }
    liveness_->wait([&] { return done_within(kSlice); }, name_of(operation.op), operation.unit, operation.watch_number);
  } catch (const RankLostError& error) {
    break_group(error.rank(), message_of(error));
    throw;
  } catch (const std::exception& error) {
    fail(message_of(error));
    throw;
  }
}

void Health::close() {
  liveness_.reset();
}

void Health::drain(const std::function<bool(milliseconds)>& done_within, const Operation& operation) noexcept {
  try {
    if (!broken()) {
      wait([&](milliseconds limit) { return broken() || done_within(limit); }, operation);
    }
  } catch (const std::exception&) {
    // The group is broken now, and whoever waits for this rank is told.
  }
}

} // namespace ebb::comm
