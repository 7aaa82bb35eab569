#include "ebb/shard/comm_hook.h"

#include "finished_work.h"
#include "work_then.h"

#include <torch/torch.h>

#include <utility>

namespace ebb::shard {
namespace {

// A reduction of a rounded copy, copied back at wait().
std::unique_ptr<comm::Work> copied_back(std::unique_ptr<comm::Work> work, at::Tensor narrow, at::Tensor output) {
  return std::make_unique<WorkThen>(
      std::move(work), [narrow = std::move(narrow), output = std::move(output)] { output.copy_(narrow); });
}

CommHook compress(at::ScalarType dtype) {
  return [dtype](const GradientReduction& reduction) -> std::unique_ptr<comm::Work> {
    const auto input = reduction.input.to(dtype);
    if (reduction.whole) {
      auto work = reduction.group.all_reduce(input, comm::ReduceOp::kSum, reduction.divisor, reduction.unit);
      return copied_back(std::move(work), input, reduction.output);
    }
    const auto output = at::empty(reduction.output.sizes(), input.options());
    auto work = reduction.group.reduce_scatter(output, input, reduction.divisor, reduction.unit);
    return copied_back(std::move(work), output, reduction.output);
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
