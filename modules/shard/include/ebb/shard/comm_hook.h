#pragma once

#include "ebb/comm/communicator.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>

namespace ebb::shard {

/// One reduction that a CommHook is asked to make.
struct GradientReduction {
  std::string unit;
  /// Of one of the unit's flat parameters on this rank: size() x the elements of `output`, or as many where `whole`. May
  /// be overwritten.
  at::Tensor input;
  /// Where this rank's part of sum / divisor goes; `input` itself where `whole`.
  at::Tensor output;
  comm::Communicator& group;
  double divisor = 1;
  bool whole = false; ///< The unit is whole on every rank: an all-reduce instead of a reduce-scatter.
};

/// Starts a reduction in its own way, on all ranks alike; the Work ends it. FSDP's register_comm_hook().
using CommHook = std::function<std::unique_ptr<comm::Work>(const GradientReduction&)>;

/// What happens without a hook.
std::unique_ptr<comm::Work> reduce_as_is(const GradientReduction& reduction);

/// Reduces nothing: this rank's own gradient stands for the sum of as many as there are ranks. For measuring what a step
/// costs without its reductions (FSDP_USE_FAKE_REDUCE); the all-reduce between copies of hybrid sharding, and the small vote
/// on which gradients exist, remain.
std::unique_ptr<comm::Work> fake_reduce(const GradientReduction& reduction);

/// Sends gradients as bfloat16 or float16: half the bytes. Sums are taken in float and rounded once, after the division;
/// what is then beyond 65504 becomes infinite in float16.
CommHook bf16_compress_hook();
/// See bf16_compress_hook().
CommHook fp16_compress_hook();

} // namespace ebb::shard
