#pragma once

#include "health.h"
#include "host_layout.h"
#include "peer_memory.h"
#include "socket_operation.h"

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

namespace ebb::comm {

/// What a group that spans hosts knows about them, shared by all its operations.
struct HostRoutes {
  HostLayout layout;
  std::shared_ptr<PeerMemory> memory; ///< Attached to the ranks of this host; nullptr where they use sockets.
};

/// Payload that this rank sends in one operation.
struct SentBytes {
  std::int64_t total = 0;
  std::int64_t across_hosts = 0;
};

/// The messages of one operation among ranks of several hosts.
///
/// Between hosts bytes go through sockets. Within a host, where memory may be read, a message carries the address of
/// what it offers, and whoever receives it reads there; it must stay valid and unchanged until close() has returned.
class HostMessages {
 public:
  struct Incoming {
    SocketTransport::Handle handle;
    int peer = -1;
    char* to = nullptr;
    std::int64_t bytes = 0;
    const std::uint64_t* address = nullptr; ///< Of what is offered; nullptr: the bytes themselves come.
  };

  HostMessages(
      int rank, std::shared_ptr<const HostRoutes> routes, std::shared_ptr<Health> health, SocketTransport& transport,
      SocketOperation& operation);

  /// First of all; posts what close() waits for.
  void open();
  /// Whether messages between this rank and `peer` are addresses.
  bool reads(int peer) const {
    return routes_->memory != nullptr && routes_->layout.share_host(rank_, peer);
  }
  void send(const char* data, std::int64_t bytes, int peer, Stream stream);
  /// `to` is written by wait() alone where reads(peer), before that otherwise.
  Incoming receive(char* to, std::int64_t bytes, int peer, Stream stream);
  /// For the group's thread. Returns when the bytes are there.
  void wait(const Incoming& incoming);
  /// For the group's thread, when nothing is left to receive: what this rank offered has been read.
  void close();

  const SentBytes& sent() const {
    return sent_;
  }
  /// Counts what the group's thread will send later.
  void count(std::int64_t bytes, int peer);

  const HostLayout& layout() const {
    return routes_->layout;
  }
  int rank() const {
    return rank_;
  }
  int host() const {
    return layout().host_of(rank_);
  }
  /// The other ranks of this host.
  const std::vector<int>& mates() const {
    return mates_;
  }

 private:
  void read(const Incoming& incoming);

  const int rank_;
  const std::shared_ptr<const HostRoutes> routes_;
  const std::shared_ptr<Health> health_;
  SocketTransport& transport_;
  SocketOperation& operation_;
  std::vector<int> mates_;
  std::deque<std::uint64_t> addresses_; ///< In flight, so they must not move.
  std::vector<char> done_; ///< What mates say when they have read all.
  char own_done_ = 1;
  std::vector<SocketTransport::Handle> done_receives_;
  SentBytes sent_;
};

/// An operation among ranks of several hosts.
class HostOperation {
 public:
  explicit HostOperation(std::unique_ptr<HostMessages> messages) : messages_(std::move(messages)) {}
  virtual ~HostOperation() = default;
  HostOperation(const HostOperation&) = delete;
  HostOperation& operator=(const HostOperation&) = delete;

  /// On the caller's thread: starts what waits for nobody.
  virtual void post() = 0;
  /// On the group's thread, once all ranks have made the same call.
  virtual void finish() = 0;

  HostMessages& messages() {
    return *messages_;
  }

 private:
  std::unique_ptr<HostMessages> messages_;
};

} // namespace ebb::comm
