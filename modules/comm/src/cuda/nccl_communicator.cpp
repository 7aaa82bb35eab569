#include "connect_nccl.h"

#include "failure.h"
#include "subgroups.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/NCCLUtils.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <cstdlib>
#include <thread>

namespace ebb::comm {
namespace {

using Native = c10::intrusive_ptr<c10d::ProcessGroupNCCL>;

/// Order on a CUDA device is the order of its streams: wait() lets the current stream wait, and returns.
class NcclWork final : public Work {
 public:
  NcclWork(c10::intrusive_ptr<c10d::Work> work, Operation operation, std::shared_ptr<Health> health)
      : work_(std::move(work)), operation_(std::move(operation)), health_(std::move(health)) {}

  bool poll() override {
    return guarded([this] { return work_->isCompleted(); });
  }
  void wait() override {
    guarded([this] { return work_->wait(); });
  }

 private:
  template <class Body>
  bool guarded(const Body& body) {
    health_->check(operation_);
    try {
      return body();
    } catch (const std::exception& error) {
      health_->break_group(-1, message_of(error));
      health_->throw_broken(operation_);
    }
  }

  c10::intrusive_ptr<c10d::Work> work_;
  Operation operation_;
  std::shared_ptr<Health> health_;
};

/// NCCL divides by multiplying each input first, which for a divisor that is no power of two rounds once more than
/// dividing the sum does; the mean over all ranks has an operator of its own.
c10d::ReduceOp native_op(ReduceOp op, double divisor, int size) {
  if (op == ReduceOp::kMax) {
    return c10d::ReduceOp::MAX;
  }
  if (divisor == 1) {
    return c10d::ReduceOp::SUM;
  }
  if (divisor == size) {
    return c10d::ReduceOp::AVG;
  }
  c10d::ReduceOp scaled;
  scaled.op_ = c10d::ReduceOp::PREMUL_SUM;
  scaled.supplement_ = c10::make_intrusive<c10d::PreMulSumSupplement>(1 / divisor);
  return scaled;
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(
      c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Communicator> control, const GroupOptions& options,
      std::shared_ptr<Health> health)
      : Communicator(control->rank(), control->size()),
        store_(std::move(store)),
        options_(options),
        control_(std::move(control)),
        health_(std::move(health)) {
    // By default the watchdog of c10d ends the process where a peer is lost; ebb reports that itself.
    ::setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2", 0);
    ::setenv("TORCH_NCCL_ENABLE_MONITORING", "0", 0);
    auto native_options = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/true);
    native_options->timeout = options.timeout;
    native_ = c10::make_intrusive<c10d::ProcessGroupNCCL>(
        c10::make_intrusive<c10d::PrefixStore>("nccl", store_), rank(), size(), native_options);
    health_->add_on_break(
        [weak = c10::weak_intrusive_ptr<c10d::ProcessGroupNCCL>(native_)](int /*rank*/, const std::string& /*why*/) {
          if (auto native = weak.lock()) {
            // Ends its kernels, and may take a while: not on the thread that found the loss.
            std::thread([native = std::move(native)] { native->abort(); }).detach();
          }
        });
    capabilities_ = {
        .backend = "nccl",
        .all_gather = "native",
        .reduce_scatter = "native",
        .cpu = true,
        .cuda = true,
        .lacks = {"sums in rank order on the GPU (NCCL chooses the order)"}};
  }

  ~NcclCommunicator() override {
    if (!health_->broken()) {
      native_->shutdown();
    }
  }

  const Capabilities& capabilities() const override {
    return capabilities_;
  }

  std::unique_ptr<Work> all_gather(const at::Tensor& output, const at::Tensor& input, std::string_view unit) override {
    if (!input.is_cuda()) {
      return by_control(Op::kAllGather, [&] { return control_->all_gather(output, input, unit); });
    }
    check_all_gather(output, input, size(), c10::kCUDA, unit);
    const auto bytes = static_cast<std::int64_t>(input.nbytes());
    return start(Op::kAllGather, unit, input, bytes * (size() - 1), [&] {
      auto to = output;
      auto from = input;
      return native_->all_gather_single(to, from);
    });
  }

  std::unique_ptr<Work> reduce_scatter(
      const at::Tensor& output, const at::Tensor& input, double divisor, std::string_view unit) override {
    if (!input.is_cuda()) {
      return by_control(Op::kReduceScatter, [&] { return control_->reduce_scatter(output, input, divisor, unit); });
    }
    check_reduce_scatter(output, input, divisor, size(), c10::kCUDA, unit);
    const auto bytes = static_cast<std::int64_t>(output.nbytes());
    return start(Op::kReduceScatter, unit, input, bytes * (size() - 1), [&] {
      auto to = output;
      auto from = input;
      c10d::ReduceScatterOptions native_options;
      native_options.reduceOp = native_op(ReduceOp::kSum, divisor, size());
      return native_->reduce_scatter_single(to, from, native_options);
    });
  }

  std::unique_ptr<Work> all_reduce(
      const at::Tensor& tensor, ReduceOp op, double divisor, std::string_view unit) override {
    if (!tensor.is_cuda()) {
      return by_control(Op::kAllReduce, [&] { return control_->all_reduce(tensor, op, divisor, unit); });
    }
    check_all_reduce(tensor, divisor, c10::kCUDA, unit);
    TORCH_CHECK_VALUE(
        op == ReduceOp::kSum || divisor == 1, "[all_reduce] unit '", unit,
        "': NCCL cannot divide a maximum; got divisor ", divisor, ", pass 1 and divide afterwards");
    const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
    return start(Op::kAllReduce, unit, tensor, 2 * bytes * (size() - 1) / size(), [&] {
      std::vector<at::Tensor> tensors{tensor};
      c10d::AllreduceOptions native_options;
      native_options.reduceOp = native_op(op, divisor, size());
      return native_->allreduce(tensors, native_options);
    });
  }

  std::unique_ptr<Work> broadcast(const at::Tensor& tensor, int root, std::string_view unit) override {
    if (!tensor.is_cuda()) {
      return by_control(Op::kBroadcast, [&] { return control_->broadcast(tensor, root, unit); });
    }
    check_broadcast(tensor, root, size(), c10::kCUDA, unit);
    const bool last_of_ring = rank() == (root + size() - 1) % size();
    return start(Op::kBroadcast, unit, tensor, last_of_ring ? 0 : static_cast<std::int64_t>(tensor.nbytes()), [&] {
      std::vector<at::Tensor> tensors{tensor};
      c10d::BroadcastOptions native_options;
      native_options.rootRank = root;
      return native_->broadcast(tensors, native_options);
    });
  }

  void barrier() override {
    ++traffic_.calls[static_cast<std::size_t>(Op::kBarrier)];
    control_->barrier();
  }

  std::vector<std::string> exchange(const std::string& mine) override {
    auto texts = control_->exchange(mine);
    count(Op::kExchange, static_cast<std::int64_t>(mine.size()) * (size() - 1));
    return texts;
  }

  void abort() noexcept override {
    control_->abort(); // Breaks the shared Health, and by that NCCL's side.
    children_.abort();
  }

  void set_step(std::int64_t step) override {
    step_ = step;
    control_->set_step(step);
  }

  const Traffic& traffic() const override {
    return traffic_;
  }

 protected:
  std::shared_ptr<Communicator> split(const std::vector<int>& ranks, const std::string& name) override {
    return children_.split(store_, rank(), ranks, name, options_);
  }

 private:
  template <class Start>
  std::unique_ptr<Work> start(
      Op op, std::string_view unit, const at::Tensor& tensor, std::int64_t bytes_sent, const Start& native_start) {
    Operation operation{.op = op, .unit = std::string(unit), .step = step_, .dtype = tensor.scalar_type()};
    operation.bytes = static_cast<std::int64_t>(tensor.nbytes());
    health_->begin(operation);
    count(op, bytes_sent);
    try {
      return std::make_unique<NcclWork>(native_start(), operation, health_);
    } catch (const std::exception& error) {
      health_->break_group(-1, message_of(error));
      health_->throw_broken(operation);
    }
  }

  template <class Call>
  std::unique_ptr<Work> by_control(Op op, const Call& call) {
    const auto before = control_->traffic().bytes_sent[static_cast<std::size_t>(op)];
    auto work = call();
    count(op, control_->traffic().bytes_sent[static_cast<std::size_t>(op)] - before);
    return work;
  }

  void count(Op op, std::int64_t bytes) {
    ++traffic_.calls[static_cast<std::size_t>(op)];
    traffic_.bytes_sent[static_cast<std::size_t>(op)] += bytes;
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const GroupOptions options_;
  const std::shared_ptr<Communicator> control_;
  const std::shared_ptr<Health> health_;
  Native native_;
  Capabilities capabilities_;
  Traffic traffic_;
  std::int64_t step_ = 0;
  Subgroups children_;
};

} // namespace

CudaStatus cuda_status() {
  const int gpus = torch::cuda::is_available() ? static_cast<int>(torch::cuda::device_count()) : 0;
  return {
      .built = true,
      .num_gpus = gpus,
      .text = c10::str(
          "built with CUDA and NCCL ", c10d::getNcclVersion(), ", ",
          gpus == 0 ? std::string("no GPU") : c10::str(gpus, gpus == 1 ? " GPU" : " GPUs"))};
}

std::shared_ptr<Communicator> connect_nccl(
    const c10::intrusive_ptr<c10d::Store>& store, std::shared_ptr<Communicator> control, const GroupOptions& options,
    std::shared_ptr<Health> health) {
  const auto status = cuda_status();
  if (status.num_gpus == 0) {
    C10_THROW_ERROR(
        NotImplementedError, c10::str(
                                 "[connect] backend 'nccl' needs a GPU; this is ", status.text,
                                 ". Use backend 'gloo', or check the driver"));
  }
  return std::make_shared<NcclCommunicator>(store, std::move(control), options, std::move(health));
}

} // namespace ebb::comm
