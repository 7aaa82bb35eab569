#pragma once

#include "ebb/comm/communicator.h"

#include <c10/core/ScalarType.h>

#include <cstddef>

namespace ebb::comm {

/// Whether combine_in_order() knows this dtype.
bool can_combine(c10::ScalarType dtype);

/// out[i] = (((sources[0][i] + sources[1][i]) + ...) / divisor, or the maximum of the sources divided by it: the same
/// bits as adding whole tensors one after the other and dividing once. Half types are added in float and rounded once.
/// NaN wins a maximum. `out` may be one of the sources; else nothing may overlap. Integers need a divisor of 1.
void combine_in_order(
    void* out, const void* const* sources, int num_sources, std::size_t count, c10::ScalarType dtype, ReduceOp op,
    double divisor);

/// The dtype in which a sum of `dtype` is taken: float for half types, else its own.
c10::ScalarType sum_dtype_of(c10::ScalarType dtype);

// For sums of half types that are taken in several steps: what combine_in_order() does at their ends.
void widen_halves(float* out, const void* halves, std::size_t count, c10::ScalarType dtype);
void narrow_to_halves(void* out, const float* sums, std::size_t count, c10::ScalarType dtype);

} // namespace ebb::comm
