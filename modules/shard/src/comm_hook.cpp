#include "ebb/shard/comm_hook.h"

#include "finished_work.h"

#include <torch/torch.h>

#include <utility>

namespace ebb::shard {
namespace {

// A reduction of a rounded copy, copied back at wait().
class Compressed final : public comm::Work {
 public:
  Compressed(std::unique_ptr<comm::Work> work, at::Tensor narrow, at::Tensor output)
      : work_(std::move(work)), narrow_(std::move(narrow)), output_(std::move(output)) {}
  bool poll() override {
    if (!work_->poll()) {
      return false;
    }
    wait();
    return true;
  }
  void wait() override {
    work_->wait();
    if (narrow_.defined()) {
      const at::NoGradGuard no_grad;
      output_.copy_(std::exchange(narrow_, at::Tensor()));
    }
  }
  void release() override {
    wait();
    work_->release();
  }

 private:
  std::unique_ptr<comm::Work> work_;
  at::Tensor narrow_;
  at::Tensor output_;
};

CommHook compress(at::ScalarType dtype) {
  return [dtype](const GradientReduction& reduction) -> std::unique_ptr<comm::Work> {
    const auto input = reduction.input.to(dtype);
    if (reduction.whole) {
      auto work = reduction.group.all_reduce(input, comm::ReduceOp::kSum, reduction.divisor, reduction.unit);
      return std::make_unique<Compressed>(std::move(work), input, reduction.output);
    }
    const auto output = at::empty(reduction.output.sizes(), input.options());
    auto work = reduction.group.reduce_scatter(output, input, reduction.divisor, reduction.unit);
    return std::make_unique<Compressed>(std::move(work), output, reduction.output);
  };
}

} // namespace

std::unique_ptr<comm::Work> reduce_as_is(const GradientReduction& reduction) {
  return reduction.whole
             ? reduction.group.all_reduce(reduction.input, comm::ReduceOp::kSum, reduction.divisor, reduction.unit)
             : reduction.group.reduce_scatter(reduction.output, reduction.input, reduction.divisor, reduction.unit);
}

std::unique_ptr<comm::Work> fake_reduce(const GradientReduction& reduction) {
  const at::NoGradGuard no_grad;
  const auto& own =
      reduction.whole ? reduction.input : reduction.input.view({reduction.group.size(), -1})[reduction.group.rank()];
  reduction.output.copy_(own).mul_(reduction.group.size() / reduction.divisor);
  return std::make_unique<FinishedWork>();
}

CommHook bf16_compress_hook() {
  return compress(at::kBFloat16);
}

CommHook fp16_compress_hook() {
  return compress(at::kHalf);
}

} // namespace ebb::shard
