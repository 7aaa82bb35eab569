#pragma once

#include "ebb/comm/init.h"

#include "health.h"
#include "host_layout.h"
#include "scratch_pool.h"
#include "socket_operation.h"
#include "socket_transport.h"
#include "subgroups.h"

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace ebb::comm {

/// Collectives by messages between all pairs (Gloo's send and receive).
///
/// all_gather receives straight into the output; reductions receive the others' parts of this rank's chunk and add them
/// in rank order. Transfers start when an operation is called, on Gloo's thread; one thread of the group's own does
/// what must follow them (sums, second phases), in the order of the calls.
class SocketCommunicator : public Communicator {
 public:
  SocketCommunicator(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const GroupOptions& options,
      std::shared_ptr<Health> health, HostLayout layout);
  ~SocketCommunicator() override;

  const Capabilities& capabilities() const override;
  std::unique_ptr<Work> all_gather(const at::Tensor& output, const at::Tensor& input, std::string_view unit) override;
  std::unique_ptr<Work> reduce_scatter(
      const at::Tensor& output, const at::Tensor& input, double divisor, std::string_view unit) override;
  std::unique_ptr<Work> all_reduce(
      const at::Tensor& tensor, ReduceOp op, double divisor, std::string_view unit) override;
  std::unique_ptr<Work> broadcast(const at::Tensor& tensor, int root, std::string_view unit) override;
  void barrier() override;
  std::vector<std::string> exchange(const std::string& mine) override;
  void abort() noexcept override;
  void set_step(std::int64_t step) override;
  const Traffic& traffic() const override;

 protected:
  using OperationPtr = std::shared_ptr<SocketOperation>;

  std::shared_ptr<Communicator> split(const std::vector<int>& ranks, const std::string& name) override;
  /// Ends what can be ended, and the group's thread. Later calls do nothing; for destructors, before members that
  /// operations use go away.
  void leave();
  /// A new operation; throws where the group is broken.
  OperationPtr begin(Op op, std::string_view unit, c10::ScalarType dtype, std::int64_t bytes, int detail);
  /// Starts the transfers of `operation` and hands it to the group's thread. Breaks the group where that fails.
  std::unique_ptr<Work> submit(OperationPtr operation, const std::function<void(SocketOperation&)>& post);
  /// Counts a call, and what it sends to each peer; or to all, and to those on other hosts among them.
  void count(Op op, const std::function<std::int64_t(int peer)>& bytes_to);
  void count(Op op, std::int64_t total, std::int64_t across);

  const HostLayout layout_;
  const std::shared_ptr<Health> health_;
  Capabilities capabilities_;
  ScratchPool scratch_;
  std::shared_ptr<SocketTransport> transport_; ///< Set before the first operation, reset by leave().

 private:
  void send(SocketOperation& operation, const char* data, std::int64_t bytes, int peer, Stream stream);
  void receive(
      SocketOperation& operation, std::vector<SocketTransport::Handle>& handles, char* data, std::int64_t bytes,
      int peer, Stream stream);
  void gather(SocketOperation& operation, char* output, const char* input, std::int64_t bytes);
  std::vector<const void*> exchange_chunks(
      SocketOperation& operation, const char* from,
      const std::function<std::pair<std::int64_t, std::int64_t>(int rank)>& chunk);
  void run_operations();
  void run(const OperationPtr& operation);

  const c10::intrusive_ptr<c10d::Store> store_;
  const GroupOptions options_;
  Traffic traffic_;
  std::int64_t step_ = 0;
  std::uint64_t next_number_ = 0;
  Subgroups children_;

  std::vector<OperationPtr> abandoned_; ///< Failed ones: their memory may be in use until the transport is gone.

  std::mutex mutex_; ///< Guards abandoned_, queue_ and stopping_.
  std::condition_variable changed_;
  std::deque<OperationPtr> queue_;
  bool stopping_ = false;
  std::thread worker_;
};

} // namespace ebb::comm
