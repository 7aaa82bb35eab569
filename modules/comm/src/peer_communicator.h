#pragma once

#include "ebb/comm/init.h"

#include "peer_group.h"
#include "subgroups.h"

#include <memory>

namespace ebb::comm {

/// Collectives of ranks on one host that read each other's memory (Note [Reading peers' memory]).
class PeerCommunicator final : public Communicator {
 public:
  /// @param memory  Attached to all peers.
  PeerCommunicator(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const GroupOptions& options,
      std::shared_ptr<Health> health, std::unique_ptr<PeerMemory> memory);
  ~PeerCommunicator() override;

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
  std::shared_ptr<Communicator> split(const std::vector<int>& ranks, const std::string& name) override;

 private:
  using OperationPtr = PeerGroup::OperationPtr;

  OperationPtr begin(Op op, std::string_view unit, c10::ScalarType dtype, std::int64_t bytes, int detail);
  std::unique_ptr<Work> post(OperationPtr operation);
  void count(Op op, std::int64_t bytes);

  const c10::intrusive_ptr<c10d::Store> store_;
  const GroupOptions options_;
  Capabilities capabilities_;
  Traffic traffic_;
  std::int64_t step_ = 0;
  std::uint64_t next_number_ = 0;
  Subgroups children_;
  std::shared_ptr<Health> health_;
  std::shared_ptr<PeerGroup> group_;
};

} // namespace ebb::comm
