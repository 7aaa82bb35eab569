#pragma once

#include "ebb/comm/communicator.h"

#include <cstdint>
#include <functional>
#include <limits>

namespace ebb::train {

/// Does one forward and backward of `micro_batch` samples, as training would, lets go of what it made (gradients too),
/// and returns the peak of the memory in use meanwhile, in bytes: for instance by peak_memory_bytes_of(). Throwing for
/// want of memory says that it is too large: std::bad_alloc, c10::OutOfMemoryError, LibTorch's CPU allocator.
using MicroBatchProbe = std::function<std::int64_t(std::int64_t micro_batch)>;

/// Bounds of largest_micro_batch().
struct MicroBatchSearch {
  std::int64_t budget_bytes = std::numeric_limits<std::int64_t>::max(); ///< Of this rank; the peak may reach it.
  std::int64_t largest = 1024; ///< Not tried beyond; at least 1. The smallest of the ranks' counts.
};

/// The largest micro-batch whose peak memory stays within the budget on every rank: doubles from 1 until one does not
/// fit, then bisects between. Assumes that more samples need more memory. Collective: ranks try the same sizes at the
/// same time, so that the probe may use a sharded model, and agree after each; every rank gets the same answer.
///
/// Leave room in the budget for the optimizer's state, if it is made by the first step. A rank that really runs out of
/// memory within a collective of the probe leaves its peers waiting there until the group's timeout, so let the
/// budget, not the machine, be the limit.
/// @throws ValueError on every rank when not even 1 fits; names the first rank where it does not. Another error of a
///         probe is rethrown on its rank, and named on the others.
/// Cost: about 2 log2(result) probes, and one small exchange each.
std::int64_t largest_micro_batch(
    comm::Communicator& world, const MicroBatchProbe& probe, const MicroBatchSearch& search);

} // namespace ebb::train
