#pragma once

#include "ebb/comm/cuda_status.h"
#include "ebb/comm/init.h"

#include "health.h"

#include <memory>

namespace ebb::comm {

// cuda_status() and connect_nccl() are chosen when linking: cuda/nccl_communicator.cpp or nccl_absent.cpp.

/// Collectives of CUDA tensors by NCCL, each rank on its thread's current device; CPU tensors, exchange() and barrier()
/// go to `control`, a group of the same ranks. Collective.
/// @throws NotImplementedError where this build has no CUDA backend, or there is no GPU.
std::shared_ptr<Communicator> connect_nccl(
    const c10::intrusive_ptr<c10d::Store>& store, std::shared_ptr<Communicator> control, const GroupOptions& options,
    std::shared_ptr<Health> health);

} // namespace ebb::comm
