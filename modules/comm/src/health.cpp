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

Health::Health(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const GroupOptions& options, OnBreak on_break)
    : own_rank_(rank), options_(options), on_break_(std::move(on_break)) {
  liveness_ = std::make_unique<Liveness>(
      store, rank, size, options, [this](int lost, const std::string& why) { break_group(lost, why); });
}

void Health::begin(const Operation& operation) {
  check(operation);
  liveness_->begin(name_of(operation.op), operation.unit, operation.step);
}

void Health::set_step(std::int64_t step) {
  liveness_->set_step(step);
}

void Health::break_group(int rank, const std::string& why) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (broken_.load()) {
      return;
    }
    lost_rank_ = rank;
    why_ = why;
    broken_.store(true, std::memory_order_release);
  }
  on_break_(rank, why);
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
  // A broken connection says that somebody is lost, not who: the one at its other end may itself have given up because
  // of a third. The heartbeats tell.
  const auto deadline = std::chrono::steady_clock::now() + 3 * options_.heartbeat + 500ms;
  while (rank < 0 && liveness_) {
    if (const int lost = liveness_->lost_rank(); lost >= 0) {
      rank = lost;
      why = liveness_->lost_reason();
      const std::lock_guard lock(mutex_);
      lost_rank_ = rank;
      why_ = why;
    } else if (std::chrono::steady_clock::now() > deadline) {
      break;
    } else {
      std::this_thread::sleep_for(5ms);
    }
  }
  throw_rank_lost(operation, rank, why);
}

void Health::wait(const std::function<bool(milliseconds)>& done_within, const Operation& operation) {
  try {
    if (done_within(kFirstWait)) {
      return;
    }
    liveness_->wait([&] { return done_within(kSlice); }, name_of(operation.op), operation.unit);
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
