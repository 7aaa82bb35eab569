#pragma once

#include "ebb/comm/communicator.h"

#include <vector>

namespace ebb::train {

/// Every rank's numbers, in rank order and bit for bit; each rank gives as many. Through exchange(), so that it works
/// with every backend, and what is computed from them is the same on all ranks. Collective.
std::vector<std::vector<double>> shared_numbers(comm::Communicator& world, const std::vector<double>& mine);

} // namespace ebb::train
