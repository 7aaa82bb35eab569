#pragma once

#include "module_tree.h"

#include "ebb/comm/communicator.h"

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ebb::shard {

/// Compares the ranks' options, their models by names, shapes, dtypes and requires_grad, and the units they chose.
/// Collective; the first collective of fully_shard() and replicate(), so that a difference is an error and not a hang.
/// @throws IncompatibleStateError that names the first parameter or buffer that differs, on every rank.
void check_same_model(
    std::string_view function, const ModuleTree& tree, const std::string& settings, const std::string& units,
    comm::Communicator& group);

/// Copies rank 0's parameters and buffers to every rank. Collective.
void broadcast_from_rank0(const ModuleTree& tree, comm::Communicator& group);

/// Copies rank 0's buffers to every rank, with one broadcast for each dtype and device. Collective.
void broadcast_buffers_from_rank0(
    const std::vector<std::pair<std::string, at::Tensor>>& buffers, comm::Communicator& group);

/// all_reduce() of a few numbers, wherever they are: gradients may be on the host while the group serves GPUs alone.
/// Collective.
void all_reduce_small(comm::Communicator& group, at::Tensor& tensor, comm::ReduceOp op, std::string_view unit);

} // namespace ebb::shard
