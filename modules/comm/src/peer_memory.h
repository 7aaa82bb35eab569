#pragma once

#include "control_block.h"

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ebb::comm {

/// Equal for processes of one host that could read each other's memory, as far as their surroundings go: boot, PID and
/// user namespace, user. Without spaces.
std::string host_identity();

/// What another process must know to read this rank's memory.
struct PeerAddress {
  std::string host; ///< host_identity() of it.
  pid_t pid = 0;
  int fd = -1; ///< Of the control block.
  std::uint64_t nonce_address = 0;
  std::uint64_t nonce = 0;

  std::string text() const;
  static PeerAddress parse(const std::string& text);
};

/// This rank's control block, the peers' blocks, and their memory. See Note [Reading peers' memory].
class PeerMemory {
 public:
  PeerMemory(int rank, int size);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  /// Why this system has none of it; empty where it has.
  const std::string& unavailable() const {
    return unavailable_;
  }
  PeerAddress address() const;

  /// Maps the blocks of the peers among `ranks` and reads a value from each of them. The others can be neither read nor
  /// rung.
  /// @param peers  By rank.
  /// @return  Why it cannot; empty where it can. Peers may try ours until all have said how it went.
  std::string attach(const std::vector<PeerAddress>& peers, const std::vector<int>& ranks);
  /// All peers have our block: the descriptor is not needed any more.
  void close_descriptor();

  ControlBlock& block(int rank) const {
    return *blocks_[rank];
  }
  /// Copies from `peer`'s memory. False where that fails; errno says why.
  bool read(int peer, std::uint64_t address, void* to, std::size_t bytes) const;
  /// Whether `peer`'s process still runs.
  bool alive(int peer) const;

  /// Something in this rank's block has changed for `peer`, or in `peer`'s by this rank: wakes it if it sleeps.
  void ring(int peer) const;
  void ring_all() const;
  /// Sleeps until rung, `limit_us` at most, unless `ready()`, called once when peers can see that we sleep.
  template <class Ready>
  void sleep(int limit_us, Ready&& ready) const {
    auto& own = block(rank_);
    const auto seen = own.bell.load();
    own.sleepers.fetch_add(1);
    if (!ready()) {
      sleep_on(own.bell, seen, limit_us);
    }
    own.sleepers.fetch_sub(1);
  }

 private:
  static void sleep_on(std::atomic<std::uint32_t>& bell, std::uint32_t seen, int limit_us);

  const int rank_;
  std::string unavailable_;
  int fd_ = -1;
  std::uint64_t nonce_ = 0; ///< Peers read it here as proof that they can.
  std::vector<ControlBlock*> blocks_;
  std::vector<PeerAddress> peers_;
};

} // namespace ebb::comm
