#include "ebb/comm/dry_group.h"

#include "operation.h"

#include <torch/torch.h>

#include <utility>

namespace ebb::comm {
namespace {

class DryWork final : public Work {
 public:
  bool poll() override {
    return true;
  }
  void wait() override {}
};

class DryCommunicator final : public Communicator {
 public:
  struct Log {
    std::vector<CollectiveRecord> records;
    std::int64_t step = 0;
    std::int64_t bytes_sent = 0;
  };

  DryCommunicator(int rank, int size, std::string name, std::shared_ptr<Log> log)
      : Communicator(rank, size), name_(std::move(name)), log_(std::move(log)) {
    capabilities_ = {
        .backend = "dry",
        .all_gather = "recorded",
        .reduce_scatter = "recorded",
        .cpu = true,
        .cuda = true,
        .lacks = {}};
  }

  const Capabilities& capabilities() const override {
    return capabilities_;
  }
  std::unique_ptr<Work> all_gather(const at::Tensor& output, const at::Tensor& input, std::string_view unit) override {
    check_all_gather(output, input, size(), input.device().type(), unit);
    return take(Op::kAllGather, unit, input, (size() - 1) * bytes_of(input));
  }
  std::unique_ptr<Work> reduce_scatter(
      const at::Tensor& output, const at::Tensor& input, double divisor, std::string_view unit) override {
    check_reduce_scatter(output, input, divisor, size(), input.device().type(), unit);
    return take(Op::kReduceScatter, unit, input, bytes_of(input) / size() * (size() - 1));
  }
  std::unique_ptr<Work> all_reduce(
      const at::Tensor& tensor, ReduceOp /*op*/, double divisor, std::string_view unit) override {
    check_all_reduce(tensor, divisor, tensor.device().type(), unit);
    return take(
        Op::kAllReduce, unit, tensor,
        all_reduce_bytes(tensor.numel(), static_cast<std::int64_t>(tensor.element_size()), rank(), size()));
  }
  std::unique_ptr<Work> broadcast(const at::Tensor& tensor, int root, std::string_view unit) override {
    check_broadcast(tensor, root, size(), tensor.device().type(), unit);
    return take(Op::kBroadcast, unit, tensor, rank() == root ? (size() - 1) * bytes_of(tensor) : 0);
  }
  void barrier() override {
    note(Op::kBarrier, "", 0, at::kByte, 0);
  }
  std::vector<std::string> exchange(const std::string& mine) override {
    check_exchange(mine);
    const auto bytes = static_cast<std::int64_t>(mine.size());
    note(Op::kExchange, "", bytes, at::kByte, (size() - 1) * bytes);
    return std::vector<std::string>(static_cast<std::size_t>(size()), mine);
  }
  void abort() noexcept override {}
  void set_step(std::int64_t step) override {
    log_->step = step;
  }
  const Traffic& traffic() const override {
    return traffic_;
  }

  Log& log() const {
    return *log_;
  }

 protected:
  std::shared_ptr<Communicator> split(const std::vector<int>& ranks, const std::string& name) override {
    const auto here = std::find(ranks.begin(), ranks.end(), rank());
    return std::make_shared<DryCommunicator>(
        static_cast<int>(here - ranks.begin()), static_cast<int>(ranks.size()), name, log_);
  }

 private:
  static std::int64_t bytes_of(const at::Tensor& tensor) {
    return static_cast<std::int64_t>(tensor.nbytes());
  }
  std::unique_ptr<Work> take(Op op, std::string_view unit, const at::Tensor& tensor, std::int64_t sent) {
    note(op, unit, bytes_of(tensor), tensor.scalar_type(), sent);
    return std::make_unique<DryWork>();
  }
  void note(Op op, std::string_view unit, std::int64_t bytes, at::ScalarType dtype, std::int64_t sent) {
    const auto index = static_cast<std::size_t>(op);
    ++traffic_.calls[index];
    traffic_.bytes_sent[index] += sent;
    log_->bytes_sent += sent;
    CollectiveRecord record;
    record.number = ++number_;
    record.op = op;
    record.unit = unit;
    record.bytes = bytes;
    record.dtype = dtype;
    record.step = log_->step;
    record.group = name_;
    record.group_size = size();
    record.state = CollectiveRecord::State::kDone;
    log_->records.push_back(std::move(record));
  }

  std::string name_;
  std::shared_ptr<Log> log_;
  Capabilities capabilities_;
  Traffic traffic_;
  std::uint64_t number_ = 0;
};

DryCommunicator::Log& log_of(const Communicator& group) {
  const auto* dry = dynamic_cast<const DryCommunicator*>(&group);
  TORCH_CHECK_VALUE(
      dry, "[dry_collectives] expected a group made by dry_group(), got one of backend '", group.capabilities().backend,
      "'; flight_record() knows the collectives of others");
  return dry->log();
}

} // namespace

std::shared_ptr<Communicator> dry_group(int rank, int size) {
  TORCH_CHECK_VALUE(
      0 <= rank && rank < size, "[dry_group] expected 0 <= rank < size, got rank ", rank, " of ", size, " ranks");
  return std::make_shared<DryCommunicator>(rank, size, "world", std::make_shared<DryCommunicator::Log>());
}

std::vector<CollectiveRecord> dry_collectives(const Communicator& group) {
  return log_of(group).records;
}

std::int64_t dry_bytes_sent(const Communicator& group) {
  return log_of(group).bytes_sent;
}

void clear_dry_collectives(Communicator& group) {
  log_of(group).records.clear();
  log_of(group).bytes_sent = 0;
}

} // namespace ebb::comm
