#include "peer_group.h"

#include "failure.h"
#include "ordered_sum.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace ebb::comm {
namespace {

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

} // namespace ebb::comm
