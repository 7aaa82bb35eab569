#include "peer_communicator.h"

#include "exchange.h"

#include <cstring>

namespace ebb::comm {
namespace {

class PeerWork final : public Work {
 public:
  PeerWork(std::shared_ptr<PeerGroup> group, PeerGroup::OperationPtr operation)
      : group_(std::move(group)), operation_(std::move(operation)) {}

  bool poll() override {
    return group_->poll(*operation_);
  }
  void wait() override {
    group_->wait(*operation_);
  }
  void release() override {
    group_->release(*operation_);
  }

 private:
  std::shared_ptr<PeerGroup> group_;
  PeerGroup::OperationPtr operation_; // Goes on in the group where this Work is dropped.
};

} // namespace

PeerCommunicator::PeerCommunicator(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const GroupOptions& options,
    std::shared_ptr<Health> health, std::unique_ptr<PeerMemory> memory)
    : Communicator(rank, size), store_(store), options_(options), health_(std::move(health)) {
  capabilities_ = {
      .backend = "gloo",
      .all_gather = "read peers' memory",
      .reduce_scatter = "read peers' memory, sum in rank order",
      .cpu = true,
      .cuda = false,
      .lacks = {"CUDA tensors", "sums of float8, complex, bool and 8- and 16-bit integer tensors"}};
  group_ = std::make_shared<PeerGroup>(rank, size, std::move(memory), health_);
  health_->add_on_break([group = std::weak_ptr(group_)](int cause, const std::string& why) {
    if (const auto alive = group.lock()) {
      alive->fail(cause, why);
    }
  });
}

PeerCommunicator::~PeerCommunicator() {
  group_->leave({.op = Op::kBarrier, .unit = "the end of the group", .step = step_});
  health_->close();
}

const Capabilities& PeerCommunicator::capabilities() const {
  return capabilities_;
}

const Traffic& PeerCommunicator::traffic() const {
  return traffic_;
}

void PeerCommunicator::set_step(std::int64_t step) {
  step_ = step;
  health_->set_step(step);
}

void PeerCommunicator::abort() noexcept {
  health_->fail("it left the group by abort()");
  children_.abort();
}

std::shared_ptr<Communicator> PeerCommunicator::split(const std::vector<int>& ranks, const std::string& name) {
  return children_.split(store_, rank(), ranks, name, options_);
}

PeerCommunicator::OperationPtr PeerCommunicator::begin(
    Op op, std::string_view unit, c10::ScalarType dtype, std::int64_t bytes, int detail) {
  auto operation = std::make_shared<PeerOperation>();
  operation->info.op = op;
  operation->info.unit = std::string(unit);
  operation->info.step = step_;
  operation->info.number = next_number_;
  operation->info.dtype = dtype;
  operation->info.bytes = bytes;
  operation->info.detail = detail;
  health_->begin(operation->info);
  ++next_number_;
  operation->header = OperationHeader(operation->info);
  return operation;
}

std::unique_ptr<Work> PeerCommunicator::post(OperationPtr operation) {
  group_->post(operation);
  return std::make_unique<PeerWork>(group_, std::move(operation));
}

void PeerCommunicator::count(Op op, std::int64_t bytes) {
  ++traffic_.calls[static_cast<std::size_t>(op)];
  traffic_.bytes_sent[static_cast<std::size_t>(op)] += bytes;
}

std::unique_ptr<Work> PeerCommunicator::all_gather(
    const at::Tensor& output, const at::Tensor& input, std::string_view unit) {
  check_all_gather(output, input, size(), c10::kCPU, unit);
  const auto bytes = static_cast<std::int64_t>(input.nbytes());
  auto operation = begin(Op::kAllGather, unit, input.scalar_type(), bytes, 0);
  count(Op::kAllGather, bytes * (size() - 1));
  operation->kept = {output, input};
  operation->input = static_cast<const char*>(input.const_data_ptr());
  operation->output = static_cast<char*>(output.mutable_data_ptr());
  if (char* own = operation->output + rank() * bytes; bytes > 0 && own != operation->input) {
    std::memcpy(own, operation->input, static_cast<std::size_t>(bytes));
  }
  return post(std::move(operation));
}

std::unique_ptr<Work> PeerCommunicator::reduce_scatter(
    const at::Tensor& output, const at::Tensor& input, double divisor, std::string_view unit) {
  check_reduce_scatter(output, input, divisor, size(), c10::kCPU, unit);
  auto operation = begin(Op::kReduceScatter, unit, input.scalar_type(), static_cast<std::int64_t>(input.nbytes()), 0);
  count(Op::kReduceScatter, static_cast<std::int64_t>(output.nbytes()) * (size() - 1));
  operation->kept = {output, input};
  operation->input = static_cast<const char*>(input.const_data_ptr());
  operation->output = static_cast<char*>(output.mutable_data_ptr());
  operation->divisor = divisor;
  return post(std::move(operation));
}

std::unique_ptr<Work> PeerCommunicator::all_reduce(
    const at::Tensor& tensor, ReduceOp op, double divisor, std::string_view unit) {
  check_all_reduce(tensor, divisor, c10::kCPU, unit);
  const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
  auto operation = begin(Op::kAllReduce, unit, tensor.scalar_type(), bytes, static_cast<int>(op));
  count(Op::kAllReduce, all_reduce_bytes(tensor.numel(), tensor.element_size(), rank(), size()));
  operation->kept = {tensor};
  operation->output = static_cast<char*>(tensor.mutable_data_ptr());
  operation->input = operation->output;
  operation->divisor = divisor;
  return post(std::move(operation));
}

std::unique_ptr<Work> PeerCommunicator::broadcast(const at::Tensor& tensor, int root, std::string_view unit) {
  check_broadcast(tensor, root, size(), c10::kCPU, unit);
  const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
  auto operation = begin(Op::kBroadcast, unit, tensor.scalar_type(), bytes, root);
  count(Op::kBroadcast, rank() == root ? bytes * (size() - 1) : 0);
  operation->kept = {tensor};
  operation->output = static_cast<char*>(tensor.mutable_data_ptr());
  operation->input = operation->output;
  return post(std::move(operation));
}

void PeerCommunicator::barrier() {
  auto operation = begin(Op::kBarrier, "", c10::kByte, 0, 0);
  count(Op::kBarrier, 0);
  post(std::move(operation))->wait();
}

std::vector<std::string> PeerCommunicator::exchange(const std::string& mine) {
  check_exchange(mine);
  const auto gather = [this](const Bytes& output, const Bytes& input) {
    const auto bytes = static_cast<std::int64_t>(input->size());
    auto operation = begin(Op::kExchange, "", c10::kByte, bytes, 0);
    operation->kept_bytes = {output, input};
    operation->input = input->data();
    operation->output = output->data();
    if (bytes > 0) {
      std::memcpy(output->data() + rank() * bytes, input->data(), input->size());
    }
    post(std::move(operation))->wait();
  };
  auto texts = exchange_by(gather, mine, size());
  count(Op::kExchange, static_cast<std::int64_t>(mine.size()) * (size() - 1));
  return texts;
}

} // namespace ebb::comm
