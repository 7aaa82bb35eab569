#pragma once

#include "ebb/comm/communicator.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace ebb::shard {

/// Norm over the gradients of `sharded`, of which each rank of `group` holds a part, and of `whole`, of which each holds
/// all; and scaling so that it is at most `max_norm`, as torch::nn::utils::clip_grad_norm_ does. Collective over `group`,
/// if there is one and `sharded` is not empty.
/// @param norm_type  1, 2 or infinity; ValueError otherwise.
/// @return The norm before scaling.
double clip_gradients(
    const std::vector<at::Tensor>& sharded, const std::vector<at::Tensor>& whole, double max_norm, double norm_type,
    comm::Communicator* group);

} // namespace ebb::shard
