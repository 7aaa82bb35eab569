#pragma once

#include "ebb/comm/init.h"

namespace ebb::comm {

// connect() and single() as they are without the flight recorder: what it holds, and what is split off.

std::shared_ptr<Communicator> connect_group(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const GroupOptions& options);
std::shared_ptr<Communicator> single_group();

} // namespace ebb::comm
