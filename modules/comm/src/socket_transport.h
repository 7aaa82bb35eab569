#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace c10d {
class Store;
} // namespace c10d

namespace ebb::comm {

/// Tagged messages between all pairs of a group, over c10d's Gloo.
class SocketTransport {
 public:
  using Handle = c10::intrusive_ptr<c10d::Work>;

  /// Collective over the ranks of `store`; all must have arrived, since it gives up after a few seconds.
  /// @param host  This host's address, where peers reach it.
  SocketTransport(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const std::string& host);
  ~SocketTransport();
  SocketTransport(const SocketTransport&) = delete;
  SocketTransport& operator=(const SocketTransport&) = delete;

  /// Starts a transfer; messages of equal tag between two ranks keep their order. The memory stays the caller's until
  /// the handle has been waited for, or this object is gone.
  Handle send(const void* data, std::size_t bytes, int peer, int tag);
  Handle receive(void* data, std::size_t bytes, int peer, int tag);

  /// Blocks until the transfer is done. For one thread. Throws whatever Gloo throws when the connection is gone, and
  /// at once when this rank has cut it.
  void wait(const Handle& handle);

  /// Cuts all connections: every wait in this group ends with an exception, here and at the peers.
  void shut() noexcept;

 private:
  struct Sockets;
  class Group;
  std::unique_ptr<Sockets> sockets_;
  std::unique_ptr<Group> group_;
  std::mutex mutex_; ///< Around calls of Gloo that start a transfer.
  std::mutex waiting_mutex_; ///< Guards the two below.
  Handle waiting_for_;
  bool shut_ = false;
};

} // namespace ebb::comm
