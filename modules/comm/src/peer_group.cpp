#include "peer_group.h"

#include "failure.h"
#include "ordered_sum.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
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
// Of all sources of a sum together: in the second-level cache, yet long enough a copy each to be worth a system call.
constexpr std::int64_t kBlockBytes = 1 << 18;
constexpr std::int64_t kSmallestBlock = 1 << 16;

// Bytes [first, second) of the chunk of an all-reduce that rank r of `size` reduces.
std::pair<std::int64_t, std::int64_t> chunk_of(const PeerOperation& operation, int r, int size) {
  const auto width = static_cast<std::int64_t>(c10::elementSize(operation.info.dtype));
  const auto [begin, end] = all_reduce_chunk(operation.info.bytes / width, r, size);
  return {begin * width, end * width};
}

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

bool PeerGroup::advance(PeerOperation& op) {
  if (op.failed || op.read == size_ - 1) {
    return false;
  }
  try {
    bool moved = see_posted(op);
    switch (op.info.op) {
      case Op::kAllGather:
      case Op::kExchange:
        moved = read_gathered(op) || moved;
        break;
      case Op::kBroadcast:
        moved = read_broadcast(op) || moved;
        break;
      case Op::kReduceScatter:
      case Op::kAllReduce:
        moved = reduce_chunk(op) || moved;
        moved = read_reduced(op) || moved;
        break;
      case Op::kBarrier:
        for (int peer = 0; peer < size_; ++peer) {
          if (op.peers[peer] == Peer::kPosted) {
            mark_read(op, peer);
          }
        }
        op.complete = op.read == size_ - 1;
        break;
    }
    return moved;
  } catch (const RankLostError&) {
    op.failed = true; // Health has the cause.
  } catch (const std::exception& error) {
    op.failed = true;
    op.error = std::current_exception();
    health_->fail(message_of(error));
  }
  return true;
}

bool PeerGroup::see_posted(PeerOperation& op) {
  if (op.posted == size_ - 1) {
    return false;
  }
  bool moved = false;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || op.peers[peer] != Peer::kUnseen) {
      continue;
    }
    const auto& theirs = slot(peer, op);
    if (theirs.posted.load(std::memory_order_acquire) == op.info.number + 1) {
      if (!op.header.agrees_with(theirs.header)) {
        throw_mismatch(op.info, rank_, peer, op.header, theirs.header);
      }
      op.peers[peer] = Peer::kPosted;
      ++op.posted;
      moved = true;
    }
  }
  return moved;
}

void PeerGroup::read(const PeerOperation& op, int peer, std::int64_t offset, void* to, std::int64_t bytes) {
  const auto& theirs = slot(peer, op);
  if (bytes == 0) {
    return;
  }
  bool good = true;
  if (theirs.address == 0) {
    std::memcpy(to, theirs.inline_bytes + offset, static_cast<std::size_t>(bytes));
  } else {
    good =
        memory_->read(peer, theirs.address + static_cast<std::uint64_t>(offset), to, static_cast<std::size_t>(bytes));
  }
  const int error = errno;
  if (good && memory_->block(peer).state.load() == RankState::kHere) {
    return;
  }
  check_peers(op);
  if (!health_->broken()) {
    health_->break_group(
        peer,
        memory_->alive(peer) ? c10::str("its memory cannot be read: ", std::strerror(error)) : "its process has ended");
  }
  health_->throw_broken(op.info);
}

void PeerGroup::mark_read(PeerOperation& op, int peer) {
  op.peers[peer] = Peer::kRead;
  ++op.read;
  slot(peer, op).read_by[rank_].store(1, std::memory_order_release);
  memory_->ring(peer);
}

bool PeerGroup::read_gathered(PeerOperation& op) {
  bool moved = false;
  for (int i = 1; i < size_; ++i) {
    const int peer = (rank_ + i) % size_; // Each rank begins with another one.
    if (op.peers[peer] == Peer::kPosted) {
      read(op, peer, 0, op.output + peer * op.info.bytes, op.info.bytes);
      mark_read(op, peer);
      moved = true;
    }
  }
  op.complete = op.read == size_ - 1;
  return moved;
}

bool PeerGroup::read_broadcast(PeerOperation& op) {
  const int root = op.info.detail;
  bool moved = false;
  for (int peer = 0; peer < size_; ++peer) {
    if (op.peers[peer] == Peer::kPosted) {
      if (peer == root) {
        read(op, peer, 0, op.output, op.info.bytes);
      }
      mark_read(op, peer);
      moved = true;
    }
  }
  op.complete = rank_ == root || op.peers[root] == Peer::kRead;
  return moved;
}

// Adds the parts of all ranks in rank order, block by block: each source is read into a buffer that stays in the cache.
void PeerGroup::reduce_range(PeerOperation& op, std::int64_t begin, std::int64_t bytes, char* output) {
  const auto block = std::max(kSmallestBlock, kBlockBytes / (size_ - 1) & ~std::int64_t{4095});
  if (scratch_.empty()) {
    scratch_.resize(static_cast<std::size_t>(block * (size_ - 1)));
  }
  const auto width = static_cast<std::int64_t>(c10::elementSize(op.info.dtype));
  const auto reduce = op.info.op == Op::kAllReduce ? static_cast<ReduceOp>(op.info.detail) : ReduceOp::kSum;
  for (std::int64_t done = 0; done < bytes; done += block) {
    const auto now = std::min(block, bytes - done);
    char* free_space = scratch_.data();
    for (int rank = 0; rank < size_; ++rank) {
      if (rank == rank_) {
        sources_[rank] = op.input + begin + done;
      } else {
        read(op, rank, begin + done, free_space, now);
        sources_[rank] = free_space;
        free_space += block;
      }
    }
    combine_in_order(
        output + done, sources_.data(), size_, static_cast<std::size_t>(now / width), op.info.dtype, reduce,
        op.divisor);
  }
}

bool PeerGroup::reduce_chunk(PeerOperation& op) {
  if (op.reduced || op.posted < size_ - 1) {
    return false;
  }
  const bool in_one_phase = op.info.op == Op::kReduceScatter || op.info.bytes <= kOnePhaseBytes;
  if (op.info.op == Op::kReduceScatter) {
    const auto bytes = op.info.bytes / size_;
    reduce_range(op, rank_ * bytes, bytes, op.output);
  } else if (in_one_phase) {
    reduce_range(op, 0, op.info.bytes, op.output); // What peers read is the copy in the slot.
  } else {
    const auto [begin, end] = chunk_of(op, rank_, size_);
    reduce_range(op, begin, end - begin, op.output + begin);
  }
  op.reduced = true;
  if (in_one_phase) {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) {
        mark_read(op, peer);
      }
    }
    op.complete = true;
  } else {
    slot(rank_, op).reduced.store(1, std::memory_order_release);
    memory_->ring_all();
  }
  return true;
}

bool PeerGroup::read_reduced(PeerOperation& op) {
  if (!op.reduced || op.complete) {
    return false;
  }
  bool moved = false;
  for (int i = 1; i < size_; ++i) {
    const int peer = (rank_ + i) % size_;
    if (op.peers[peer] == Peer::kPosted && slot(peer, op).reduced.load(std::memory_order_acquire) != 0) {
      const auto [begin, end] = chunk_of(op, peer, size_);
      read(op, peer, begin, op.output + begin, end - begin);
      mark_read(op, peer);
      moved = true;
    }
  }
  op.complete = op.read == size_ - 1;
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
