#pragma once

#include "ebb/comm/communicator.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace ebb::shard {

/// Norm over the gradients of `parameters` on all ranks of `group`, of which each rank holds a part (nullptr: this rank
/// holds all of them), and scaling so that it is at most `max_norm`, as torch::nn::utils::clip_grad_norm_ does.
/// @param norm_type  1, 2 or infinity; ValueError otherwise.
/// @return The norm before scaling.
double clip_gradients(
    const std::vector<at::Tensor>& parameters, double max_norm, double norm_type, comm::Communicator* group);

} // namespace ebb::shard
