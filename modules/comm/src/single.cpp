#include "ebb/comm/init.h"

#include "connect_group.h"
#include "failure.h"
#include "ordered_sum.h"
#include "recorded_communicator.h"

#include <torch/torch.h>

#include <atomic>
#include <cstring>

namespace ebb::comm {
namespace {

class DoneWork final : public Work {
 public:
  bool poll() override {
    return true;
  }
  void wait() override {}
};

/// Nobody to talk to: copies where input and output differ, divides, counts.
class SingleCommunicator final : public Communicator {
 public:
  SingleCommunicator() : Communicator(0, 1) {
    capabilities_ = {
        .backend = "single", .all_gather = "copy", .reduce_scatter = "copy", .cpu = true, .cuda = true, .lacks = {}};
  }

  const Capabilities& capabilities() const override {
    return capabilities_;
  }

  std::unique_ptr<Work> all_gather(const at::Tensor& output, const at::Tensor& input, std::string_view unit) override {
    check_all_gather(output, input, 1, device_of(input), unit);
    count(Op::kAllGather);
    if (input.nbytes() > 0 && output.const_data_ptr() != input.const_data_ptr()) {
      if (input.is_cpu()) {
        std::memcpy(output.mutable_data_ptr(), input.const_data_ptr(), input.nbytes());
      } else {
        output.view(-1).copy_(input.view(-1));
      }
    }
    return std::make_unique<DoneWork>();
  }

  std::unique_ptr<Work> reduce_scatter(
      const at::Tensor& output, const at::Tensor& input, double divisor, std::string_view unit) override {
    check_reduce_scatter(output, input, divisor, 1, device_of(input), unit);
    count(Op::kReduceScatter);
    reduce(output, input, ReduceOp::kSum, divisor);
    return std::make_unique<DoneWork>();
  }

  std::unique_ptr<Work> all_reduce(
      const at::Tensor& tensor, ReduceOp op, double divisor, std::string_view unit) override {
    check_all_reduce(tensor, divisor, device_of(tensor), unit);
    count(Op::kAllReduce);
    if (divisor != 1) {
      reduce(tensor, tensor, op, divisor);
    }
    return std::make_unique<DoneWork>();
  }

  std::unique_ptr<Work> broadcast(const at::Tensor& tensor, int root, std::string_view unit) override {
    check_broadcast(tensor, root, 1, device_of(tensor), unit);
    count(Op::kBroadcast);
    return std::make_unique<DoneWork>();
  }

  void barrier() override {
    count(Op::kBarrier);
  }

  std::vector<std::string> exchange(const std::string& mine) override {
    check_exchange(mine);
    count(Op::kExchange);
    return {mine};
  }

  void abort() noexcept override {
    aborted_ = true;
  }

  void set_step(std::int64_t /*step*/) override {}

  const Traffic& traffic() const override {
    return traffic_;
  }

 protected:
  std::shared_ptr<Communicator> split(const std::vector<int>& /*ranks*/, const std::string& /*name*/) override {
    return single_group();
  }

 private:
  void count(Op op) {
    if (aborted_) {
      throw_rank_lost(0, c10::str("[", name_of(op), "] this rank has left the group by abort(); make a new group"));
    }
    ++traffic_.calls[static_cast<std::size_t>(op)];
  }

  // All devices are served: whoever asks for the group of one has a place for its tensors.
  static c10::DeviceType device_of(const at::Tensor& tensor) {
    return tensor.defined() ? tensor.device().type() : c10::kCPU;
  }

  static void reduce(const at::Tensor& output, const at::Tensor& input, ReduceOp op, double divisor) {
    if (!input.is_cpu()) {
      output.view(-1).copy_(divisor == 1 ? input.view(-1) : input.view(-1).div(divisor));
      return;
    }
    const void* source = input.const_data_ptr();
    combine_in_order(
        output.mutable_data_ptr(), &source, 1, static_cast<std::size_t>(input.numel()), input.scalar_type(), op,
        divisor);
  }

  Capabilities capabilities_;
  Traffic traffic_;
  std::atomic<bool> aborted_{false};
};

} // namespace

std::shared_ptr<Communicator> single_group() {
  return std::make_shared<SingleCommunicator>();
}

std::shared_ptr<Communicator> single() {
  return record(single_group(), flight_settings());
}

} // namespace ebb::comm
