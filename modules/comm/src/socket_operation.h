#pragma once

#include "exchange.h"
#include "health.h"
#include "operation_header.h"
#include "scratch_pool.h"
#include "socket_transport.h"

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace ebb::comm {

/// Streams of messages of one operation between two ranks: everybody's header first, then what the algorithm sends; the
/// last five are HostMessages's. Messages of one stream keep their order.
enum Stream { kHeader, kFirst, kSecond, kAcross, kWithin, kRaw, kBack, kDone };

/// The tag of a message: distinct for the operations in flight and their streams.
int tag_of(const Operation& operation, Stream stream);

/// A collective of SocketCommunicator, from the call to its end. Filled by the caller's thread, then worked on by the
/// group's thread alone; `mutex` guards the last three.
struct SocketOperation {
  Operation info;
  std::vector<at::Tensor> kept; ///< Keeps alive what is sent and received.
  std::vector<Bytes> kept_bytes;
  OperationHeader header;
  std::vector<OperationHeader> peer_headers; ///< By rank; this rank's stays empty.
  ScratchPool::Buffer scratch;
  std::shared_ptr<void> plan; ///< More that transfers touch, of an algorithm's own.
  /// After the memory above, so that they go first: Gloo leaves a transfer's memory alone once its handle is gone, and
  /// not before, even if the group is.
  std::vector<SocketTransport::Handle> header_sends, header_receives, sends, receives, late_receives;
  std::function<void()> finish; ///< What follows the transfers started by the call.

  std::mutex mutex;
  std::condition_variable ended_changed;
  bool ended = false;
  bool failed = false;
  std::exception_ptr error; ///< Of a failed one; null where the group's Health knows more.
};

class SocketWork final : public Work {
 public:
  SocketWork(std::shared_ptr<SocketOperation> operation, std::shared_ptr<Health> health)
      : operation_(std::move(operation)), health_(std::move(health)) {}

  bool poll() override {
    const bool ended = ended_within(std::chrono::milliseconds(0));
    if (ended) {
      rethrow();
    }
    return ended;
  }
  void wait() override {
    if (!ended_within(std::chrono::milliseconds(0))) {
      health_->wait([this](std::chrono::milliseconds limit) { return ended_within(limit); }, operation_->info);
    }
    rethrow();
  }

 private:
  bool ended_within(std::chrono::milliseconds limit) {
    std::unique_lock lock(operation_->mutex);
    if (operation_->ended || limit.count() == 0) {
      return operation_->ended;
    }
    return operation_->ended_changed.wait_for(lock, limit, [this] { return operation_->ended; });
  }
  void rethrow() const {
    if (operation_->error) {
      std::rethrow_exception(operation_->error);
    }
    if (operation_->failed) {
      health_->throw_broken(operation_->info);
    }
  }

  std::shared_ptr<SocketOperation> operation_;
  std::shared_ptr<Health> health_;
};

} // namespace ebb::comm
