#include "peer_group.h"

#include "failure.h"

#include <sched.h>

#include <algorithm>
#include <cstring>

namespace ebb::comm {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using SteadyClock = std::chrono::steady_clock;

// Waits that end soon must not pay for a sleep; longer ones must not take the core from a rank that computes.
constexpr auto kSpin = microseconds(100);
constexpr auto kLongestSleep = milliseconds(5);
constexpr auto kBetweenProcessChecks = milliseconds(50);

} // namespace

PeerGroup::PeerGroup(int rank, int size, std::unique_ptr<PeerMemory> memory, std::shared_ptr<Health> health)
    : rank_(rank), size_(size), memory_(std::move(memory)), health_(std::move(health)), sources_(size) {}

void PeerGroup::post(const OperationPtr& operation) {
  auto& op = *operation;
  auto& own = slot(rank_, op);
  const auto is_free = [&] {
    return std::none_of(active_.begin(), active_.end(), [&](const OperationPtr& other) {
      return other->info.number % kSlots == op.info.number % kSlots;
    });
  };
  std::unique_lock lock(mutex_);
  retire();
  if (!is_free()) {
    lock.unlock();
    wait_until(is_free, op.info);
    health_->check(op.info);
    lock.lock();
  }
  op.peers.assign(size_, Peer::kUnseen);
  for (auto& mark : own.read_by) {
    mark.store(0, std::memory_order_relaxed);
  }
  own.reduced.store(0, std::memory_order_relaxed);
  own.header = op.header;
  const bool gives = op.info.op != Op::kBroadcast || op.info.detail == rank_;
  if (gives && op.info.bytes <= kInlineBytes) {
    if (op.info.bytes > 0) {
      std::memcpy(own.inline_bytes, op.input, static_cast<std::size_t>(op.info.bytes));
    }
    own.address = 0;
  } else {
    own.address = reinterpret_cast<std::uint64_t>(op.input);
    op.read_in_place = gives && (op.info.op == Op::kAllReduce || op.info.op == Op::kBroadcast);
  }
  own.posted.store(op.info.number + 1, std::memory_order_release);
  active_.push_back(operation);
  memory_->ring_all();
}

bool PeerGroup::is_done(const PeerOperation& op) const {
  return op.complete && (!op.read_in_place || all_have_read(op));
}

bool PeerGroup::poll(PeerOperation& op) {
  const std::lock_guard lock(mutex_);
  if (is_done(op)) {
    return true;
  }
  if (!op.failed && !health_->broken()) {
    advance(op);
    if (is_done(op)) {
      return true;
    }
    check_peers(op);
  }
  rethrow(op);
  return false;
}

void PeerGroup::wait(PeerOperation& op) {
  if (!poll(op)) {
    wait_until([&] { return is_done(op) || op.failed; }, op.info);
    const std::lock_guard lock(mutex_);
    if (!is_done(op)) {
      rethrow(op);
    }
  }
}

void PeerGroup::release(PeerOperation& op) {
  wait(op);
  const auto done = [&] { return closed_ || all_have_read(op); };
  {
    const std::lock_guard lock(mutex_);
    if (done()) {
      retire();
      return;
    }
  }
  wait_until(done, op.info);
  const std::lock_guard lock(mutex_);
  if (!done()) {
    health_->throw_broken(op.info);
  }
  retire();
}

void PeerGroup::wait_until(const std::function<bool()>& done, const Operation& operation) {
  auto next_check = SteadyClock::now() + kBetweenProcessChecks;
  const auto done_within = [&](milliseconds limit) {
    const auto began = SteadyClock::now();
    auto spin_until = began + kSpin;
    while (true) {
      {
        const std::lock_guard lock(mutex_);
        const bool moved = advance_others();
        if (done() || health_->broken()) {
          return true;
        }
        if (moved) {
          spin_until = SteadyClock::now() + kSpin;
          continue;
        }
      }
      const auto now = SteadyClock::now();
      if (now < spin_until) {
        ::sched_yield();
        continue;
      }
      if (now >= began + limit) {
        return false;
      }
      if (now >= next_check) {
        check_processes(operation);
        next_check = SteadyClock::now() + kBetweenProcessChecks;
      }
      const auto longest = std::min<SteadyClock::duration>(kLongestSleep, began + limit - now);
      memory_->sleep(static_cast<int>(std::chrono::duration_cast<microseconds>(longest).count()) + 1, [&] {
        const std::lock_guard lock(mutex_);
        return advance_others() || done() || health_->broken();
      });
    }
  };
  health_->wait(done_within, operation);
}

void PeerGroup::rethrow(const PeerOperation& op) {
  if (op.error) {
    std::rethrow_exception(op.error);
  }
  health_->check(op.info);
  if (closed_) {
    throw_rank_lost(op.info, rank_, "this rank has dropped the group");
  }
}

bool PeerGroup::all_have_read(const PeerOperation& op) const {
  const auto& own = slot(rank_, op);
  if (own.posted.load(std::memory_order_relaxed) != op.info.number + 1) {
    return true; // The slot is in use again, which says the same.
  }
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_ && own.read_by[peer].load(std::memory_order_acquire) == 0) {
      return false;
    }
  }
  return true;
}

void PeerGroup::retire() {
  active_.remove_if([this](const OperationPtr& operation) {
    if (operation->complete && operation->read == size_ - 1 && all_have_read(*operation)) {
      operation->kept.clear();
      operation->kept_bytes.clear();
      return true;
    }
    return false;
  });
}

bool PeerGroup::advance_others() {
  bool moved = false;
  for (const auto& operation : active_) {
    if (health_->broken()) {
      return moved;
    }
    moved = advance(*operation) || moved;
    check_peers(*operation);
  }
  retire();
  return moved;
}

// Whether a peer that we still need, or that still needs us, is gone.
void PeerGroup::check_peers(const PeerOperation& op) {
  for (int peer = 0; peer < size_ && !health_->broken(); ++peer) {
    const auto& block = memory_->block(peer);
    const auto state = block.state.load(std::memory_order_acquire);
    if (peer == rank_ || state == RankState::kHere) {
      continue;
    }
    const bool has_read = slot(rank_, op).read_by[peer].load(std::memory_order_acquire) != 0;
    if (op.peers[peer] == Peer::kRead && has_read) {
      continue;
    }
    if (state == RankState::kFailed) {
      const bool by_itself = block.cause < 0 || block.cause >= size_ || block.cause == peer;
      health_->break_group(by_itself ? peer : block.cause, block.why);
    } else if (
        state == RankState::kLeft && slot(peer, op).posted.load(std::memory_order_acquire) != op.info.number + 1) {
      health_->break_group(peer, "it left the group without making this call; all ranks must make the same calls");
    }
  }
}

void PeerGroup::check_processes(const Operation& operation) {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_ && memory_->block(peer).state.load() == RankState::kHere && !memory_->alive(peer)) {
      health_->break_group(peer, "its process has ended");
    }
  }
}

void PeerGroup::fail(int cause, const std::string& why) noexcept {
  auto& own = memory_->block(rank_);
  own.cause = cause;
  why.copy(own.why, sizeof(own.why) - 1);
  own.state.store(RankState::kFailed);
  memory_->ring_all();
}

void PeerGroup::leave(const Operation& leaving) noexcept {
  try {
    health_->drain(
        [this](milliseconds limit) {
          bool empty = false;
          const auto end = SteadyClock::now() + limit;
          do {
            {
              const std::lock_guard lock(mutex_);
              advance_others();
              empty = active_.empty();
            }
            if (!empty) {
              memory_->sleep(1000, [] { return false; });
            }
          } while (!empty && !health_->broken() && SteadyClock::now() < end);
          return empty;
        },
        leaving);
  } catch (const std::exception&) {
    // Left below in any case.
  }
  const std::lock_guard lock(mutex_);
  closed_ = true;
  for (const auto& operation : active_) {
    operation->failed = !operation->complete;
  }
  if (!health_->broken()) {
    memory_->block(rank_).state.store(RankState::kLeft);
    memory_->ring_all();
  }
  active_.clear();
}

} // namespace ebb::comm
