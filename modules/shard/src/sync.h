#pragma once

#include "module_tree.h"

#include "ebb/comm/communicator.h"

namespace ebb::shard {

/// Compares the ranks' models by names, shapes, dtypes and requires_grad. Collective; the first thing fully_shard() and
/// replicate() do, so that a difference is an error and not a hang.
/// @throws IncompatibleStateError that names the first parameter or buffer that differs, on every rank.
void check_same_model(const ModuleTree& tree, const std::string& settings, comm::Communicator& group);

/// Copies rank 0's parameters and buffers to every rank. Collective.
void broadcast_from_rank0(const ModuleTree& tree, comm::Communicator& group);

} // namespace ebb::shard
