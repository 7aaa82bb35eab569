#include "hierarchical_communicator.h"

#include "host_gather.h"
#include "host_reduce.h"
#include "ordered_sum.h"

namespace ebb::comm {
namespace {

std::string sums_of(const HostLayout& layout) {
  const std::string direct = "direct send and receive, sum in rank order";
  if (!layout.in_rank_order()) {
    return direct + " (not hierarchical: the ranks of a host are not neighbours)";
  }
  if (!chain_is_shorter(Op::kReduceScatter, layout, c10::ScalarType::Float)) {
    return direct + " (not hierarchical: with so few ranks a host that would send more)";
  }
  return "hierarchical: one partial sum from host to host, in rank order";
}

} // namespace

bool chain_is_shorter(Op op, const HostLayout& layout, c10::ScalarType dtype) {
  if (!layout.in_rank_order()) {
    return false;
  }
  const auto width = static_cast<std::int64_t>(c10::elementSize(dtype));
  const auto sum_width = static_cast<std::int64_t>(c10::elementSize(sum_dtype_of(dtype)));
  const std::int64_t size = layout.size();
  const std::int64_t hops = layout.num_hosts() - 1;
  const auto last = static_cast<std::int64_t>(layout.ranks_of(layout.num_hosts() - 1).size());
  // For `size` elements. Directly each pair exchanges one, or, in all-reduces, two; and the chain sends results back to
  // their owners, or to everybody.
  const auto direct = layout.num_pairs_across() * width * (op == Op::kAllReduce ? 2 : 1);
  const auto back = op == Op::kAllReduce ? hops * size : size - last;
  return hops * size * sum_width + back * width < direct;
}

HierarchicalCommunicator::HierarchicalCommunicator(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const GroupOptions& options,
    std::shared_ptr<Health> health, HostLayout layout, std::shared_ptr<PeerMemory> memory)
    : SocketCommunicator(store, rank, size, options, std::move(health), std::move(layout)),
      routes_(std::make_shared<const HostRoutes>(HostRoutes{layout_, memory})) {
  capabilities_.all_gather = "hierarchical: each shard once to each other host, on this host by ";
  capabilities_.all_gather += memory ? "reading peers' memory" : "sockets";
  capabilities_.reduce_scatter = sums_of(layout_);
  if (memory) {
    health_->add_on_break([memory = std::weak_ptr(memory), rank](int cause, const std::string& why) {
      if (const auto alive = memory.lock()) {
        auto& own = alive->block(rank);
        own.cause = cause;
        why.copy(own.why, sizeof(own.why) - 1);
        own.state.store(RankState::kFailed);
      }
    });
  }
}

HierarchicalCommunicator::~HierarchicalCommunicator() {
  leave();
}

template <class Make>
std::unique_ptr<Work> HierarchicalCommunicator::start(
    OperationPtr operation, std::vector<at::Tensor> kept, const Make& make) {
  operation->kept = std::move(kept);
  auto messages = std::make_unique<HostMessages>(rank(), routes_, health_, *transport_, *operation);
  const auto plan = make(std::move(messages), *operation);
  operation->plan = plan;
  const auto op = operation->info.op;
  return submit(std::move(operation), [&](SocketOperation& started) {
    plan->messages().open();
    plan->post();
    const auto& sent = plan->messages().sent();
    count(op, sent.total, sent.across_hosts);
    started.finish = [plan = plan.get()] { plan->finish(); };
  });
}

std::unique_ptr<Work> HierarchicalCommunicator::all_gather(
    const at::Tensor& output, const at::Tensor& input, std::string_view unit) {
  const auto bytes = input.defined() ? static_cast<std::int64_t>(input.nbytes()) : 0;
  if (bytes <= kOnePhaseBytes) {
    return SocketCommunicator::all_gather(output, input, unit);
  }
  check_all_gather(output, input, size(), c10::kCPU, unit);
  return start(
      begin(Op::kAllGather, unit, input.scalar_type(), bytes, 0), {output, input},
      [&](std::unique_ptr<HostMessages> messages, SocketOperation&) {
        return std::make_shared<HostGather>(
            std::move(messages), static_cast<char*>(output.mutable_data_ptr()),
            static_cast<const char*>(input.const_data_ptr()), input.numel(), input.element_size());
      });
}

std::unique_ptr<Work> HierarchicalCommunicator::reduce_scatter(
    const at::Tensor& output, const at::Tensor& input, double divisor, std::string_view unit) {
  check_reduce_scatter(output, input, divisor, size(), c10::kCPU, unit);
  const auto dtype = input.scalar_type();
  if (static_cast<std::int64_t>(output.nbytes()) <= kOnePhaseBytes ||
      !chain_is_shorter(Op::kReduceScatter, layout_, dtype)) {
    return SocketCommunicator::reduce_scatter(output, input, divisor, unit);
  }
  return start(
      begin(Op::kReduceScatter, unit, dtype, static_cast<std::int64_t>(input.nbytes()), 0), {output, input},
      [&](std::unique_ptr<HostMessages> messages, SocketOperation& operation) {
        const HostReduce::Given given{static_cast<const char*>(input.const_data_ptr()), dtype, ReduceOp::kSum, divisor};
        return std::make_shared<HostReduceScatter>(
            std::move(messages), operation, scratch_, given, static_cast<char*>(output.mutable_data_ptr()),
            output.numel());
      });
}

std::unique_ptr<Work> HierarchicalCommunicator::all_reduce(
    const at::Tensor& tensor, ReduceOp op, double divisor, std::string_view unit) {
  check_all_reduce(tensor, divisor, c10::kCPU, unit);
  const auto dtype = tensor.scalar_type();
  const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
  if (bytes <= kOnePhaseBytes || !chain_is_shorter(Op::kAllReduce, layout_, dtype)) {
    return SocketCommunicator::all_reduce(tensor, op, divisor, unit);
  }
  return start(
      begin(Op::kAllReduce, unit, dtype, bytes, static_cast<int>(op)), {tensor},
      [&](std::unique_ptr<HostMessages> messages, SocketOperation& operation) {
        auto* data = static_cast<char*>(tensor.mutable_data_ptr());
        return std::make_shared<HostAllReduce>(
            std::move(messages), operation, scratch_, HostReduce::Given{data, dtype, op, divisor}, data,
            tensor.numel());
      });
}

std::unique_ptr<Work> HierarchicalCommunicator::broadcast(const at::Tensor& tensor, int root, std::string_view unit) {
  check_broadcast(tensor, root, size(), c10::kCPU, unit);
  const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
  if (bytes <= kOnePhaseBytes) {
    return SocketCommunicator::broadcast(tensor, root, unit);
  }
  return start(
      begin(Op::kBroadcast, unit, tensor.scalar_type(), bytes, root), {tensor},
      [&](std::unique_ptr<HostMessages> messages, SocketOperation&) {
        return std::make_shared<HostBroadcast>(
            std::move(messages), static_cast<char*>(tensor.mutable_data_ptr()), tensor.numel(), tensor.element_size(),
            root);
      });
}

} // namespace ebb::comm
