#pragma once

#include "exchange.h"
#include "health.h"
#include "operation_header.h"
#include "peer_memory.h"

#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

namespace ebb::comm {

/// A collective over peers' memory, from the call until all peers have read this rank's input. Guarded by the group's
/// mutex once posted.
struct PeerOperation {
  Operation info;
  OperationHeader header;
  std::vector<at::Tensor> kept; ///< Keeps alive what is read and written.
  std::vector<Bytes> kept_bytes;
  const char* input = nullptr; ///< What peers read. All-reduce: also the output.
  char* output = nullptr;
  double divisor = 1;

  enum class Peer : std::uint8_t { kUnseen, kPosted, kRead };
  std::vector<Peer> peers; ///< By rank: how far we are with each.
  int posted = 0; ///< Peers in kPosted or kRead.
  int read = 0; ///< Peers in kRead.
  bool reduced = false;
  bool complete = false; ///< The output is valid.
  bool read_in_place = false; ///< Peers read the output itself: not the caller's before they have.
  bool failed = false;
  std::exception_ptr error; ///< Of a failed one; null where the group's Health knows more.
};

/// The state of a communicator over peers' memory: what is under way, and what moves it on. Operations move only inside
/// the calls of this rank's threads: there is no thread of its own, and a call that waits for one operation moves on all
/// of them meanwhile, so that no rank can wait for a peer that waits for it.
class PeerGroup {
 public:
  using OperationPtr = std::shared_ptr<PeerOperation>;

  PeerGroup(int rank, int size, std::unique_ptr<PeerMemory> memory, std::shared_ptr<Health> health);

  /// Gives the operation to the peers. Waits where kSlots operations have not been read by all yet.
  void post(const OperationPtr& operation);
  /// Whether the output is valid and the caller's, after moving on as far as possible without waiting.
  bool poll(PeerOperation& operation);
  void wait(PeerOperation& operation);
  /// Waits until all peers have read the input.
  void release(PeerOperation& operation);
  /// Ends what can be ended and says goodbye to the peers. Nothing may be called afterwards but poll() and wait().
  void leave(const Operation& leaving) noexcept;
  /// Tells the peers that this rank is out. From any thread; does not block.
  void fail(int cause, const std::string& why) noexcept;

  Health& health() {
    return *health_;
  }

 private:
  using Peer = PeerOperation::Peer;
  enum class Until { kComplete, kReleased };

  ControlSlot& slot(int rank, const PeerOperation& operation) const {
    return memory_->block(rank).slots[operation.info.number % kSlots];
  }
  /// Waits for `done`, called under the mutex, moving on everything.
  void wait_until(const std::function<bool()>& done, const Operation& operation);
  bool is_done(const PeerOperation& operation) const;
  bool all_have_read(const PeerOperation& operation) const;
  void rethrow(const PeerOperation& operation);

  // Under the mutex. Each returns whether anything moved.
  bool advance(PeerOperation& operation);
  bool advance_others();
  bool see_posted(PeerOperation& operation);
  bool read_gathered(PeerOperation& operation);
  bool read_broadcast(PeerOperation& operation);
  bool reduce_chunk(PeerOperation& operation);
  bool read_reduced(PeerOperation& operation);
  void reduce_range(PeerOperation& operation, std::int64_t begin, std::int64_t bytes, char* output);
  void read(const PeerOperation& operation, int peer, std::int64_t offset, void* to, std::int64_t bytes);
  void mark_read(PeerOperation& operation, int peer);
  void retire();
  void check_peers(const PeerOperation& operation);
  void check_processes(const Operation& operation);

  const int rank_;
  const int size_;
  const std::unique_ptr<PeerMemory> memory_;
  const std::shared_ptr<Health> health_;
  std::mutex mutex_; ///< Guards everything below, and the operations.
  std::list<OperationPtr> active_; ///< Oldest first, until complete and read by all.
  std::vector<char> scratch_; ///< A block of each peer's part.
  std::vector<const void*> sources_;
  bool closed_ = false;
};

} // namespace ebb::comm
