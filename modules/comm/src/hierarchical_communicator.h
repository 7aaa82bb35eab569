#pragma once

#include "host_messages.h"
#include "socket_communicator.h"

#include <memory>

namespace ebb::comm {

/// Collectives of a group that spans hosts, some of which have several ranks: bytes cross once per host, not per rank.
///
/// all_gather and broadcast: see HostGather, HostBroadcast. Sums: Note [Sums along a chain of hosts], where each host's
/// ranks are neighbours and the chain sends less than sending directly does, which depends on the dtype. Tensors of up
/// to kOnePhaseBytes, barrier() and exchange() go directly: there the number of steps counts, not the bytes.
class HierarchicalCommunicator final : public SocketCommunicator {
 public:
  /// @param memory  Attached to the ranks of this host; nullptr: they use sockets.
  HierarchicalCommunicator(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const GroupOptions& options,
      std::shared_ptr<Health> health, HostLayout layout, std::shared_ptr<PeerMemory> memory);
  ~HierarchicalCommunicator() override;

  std::unique_ptr<Work> all_gather(const at::Tensor& output, const at::Tensor& input, std::string_view unit) override;
  std::unique_ptr<Work> reduce_scatter(
      const at::Tensor& output, const at::Tensor& input, double divisor, std::string_view unit) override;
  std::unique_ptr<Work> all_reduce(
      const at::Tensor& tensor, ReduceOp op, double divisor, std::string_view unit) override;
  std::unique_ptr<Work> broadcast(const at::Tensor& tensor, int root, std::string_view unit) override;

 private:
  /// @param make  Makes the HostOperation, given its HostMessages and the operation it belongs to.
  template <class Make>
  std::unique_ptr<Work> start(OperationPtr operation, std::vector<at::Tensor> kept, const Make& make);

  const std::shared_ptr<const HostRoutes> routes_;
};

/// Whether sums along the chain of hosts send fewer bytes between hosts than sending directly does.
bool chain_is_shorter(Op op, const HostLayout& layout, c10::ScalarType dtype);

} // namespace ebb::comm
