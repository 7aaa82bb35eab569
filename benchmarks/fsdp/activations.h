#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace ebb::bench {

/// Bytes of tensors that `forward_backward` holds at its worst moment, without what it started with and without the
/// gradients finished by then: activations and the temporaries of one operator. Read from the allocator, not from the
/// resident set.
std::int64_t peak_activation_bytes(
    const std::vector<at::Tensor>& parameters, const std::function<void()>& forward_backward);

} // namespace ebb::bench
