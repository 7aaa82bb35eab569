#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>

namespace ebb::shard {

/// Floating-point operations of a call, from the shapes of its arguments on top of the stack; 0 for operators that only
/// pass over their elements. See StepProfile::flops.
std::int64_t flops_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

} // namespace ebb::shard
