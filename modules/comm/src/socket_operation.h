#pragma once

#include "exchange.h"
#include "health.h"
#include "operation.h"
#include "scratch_pool.h"
#include "socket_transport.h"

#include <condition_variable>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace ebb::comm {

/// What ranks tell each other at the start of each operation, so that a program that calls different things at
/// different ranks gets an error and not another operation's bytes.
struct OperationHeader {
  std::uint64_t number = 0;
  std::int64_t bytes = 0;
  std::int32_t op = 0;
  std::int32_t dtype = 0;
  std::int32_t detail = 0;
  char unit[64] = {}; ///< Shortened. For messages only: names need not agree.

  OperationHeader() = default;
  explicit OperationHeader(const Operation& operation)
      : number(operation.number),
        bytes(operation.bytes),
        op(static_cast<std::int32_t>(operation.op)),
        dtype(static_cast<std::int32_t>(operation.dtype)),
        detail(operation.detail) {
    std::strncpy(unit, operation.unit.c_str(), sizeof(unit) - 1);
  }
  bool agrees_with(const OperationHeader& other) const {
    return number == other.number && bytes == other.bytes && op == other.op && dtype == other.dtype && detail == other.detail;
  }
  std::string text() const {
    return describe_contents(static_cast<Op>(op), unit, bytes, static_cast<c10::ScalarType>(dtype), detail);
  }
};

/// A collective of SocketCommunicator, from the call to its end. Filled by the caller's thread, then worked on by the
/// group's thread alone; `mutex` guards the last three.
struct SocketOperation {
  Operation info;
  std::vector<at::Tensor> kept; ///< Keeps alive what is sent and received.
  std::vector<Bytes> kept_bytes;
  OperationHeader header;
  std::vector<OperationHeader> peer_headers; ///< By rank; this rank's stays empty.
  std::vector<SocketTransport::Handle> header_sends, header_receives, sends, receives, late_receives;
  ScratchPool::Buffer scratch;
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
    return ended_within(std::chrono::milliseconds(0));
  }
  void wait() override {
    if (!poll()) {
      health_->wait([this](std::chrono::milliseconds limit) { return ended_within(limit); }, operation_->info);
    }
  }

 private:
  bool ended_within(std::chrono::milliseconds limit) {
    std::unique_lock lock(operation_->mutex);
    operation_->ended_changed.wait_for(lock, limit, [this] { return operation_->ended; });
    if (operation_->failed) {
      lock.unlock();
      if (operation_->error) {
        std::rethrow_exception(operation_->error);
      }
      health_->throw_broken(operation_->info);
    }
    return operation_->ended;
  }

  std::shared_ptr<SocketOperation> operation_;
  std::shared_ptr<Health> health_;
};

} // namespace ebb::comm
