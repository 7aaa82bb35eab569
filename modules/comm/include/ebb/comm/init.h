#pragma once

#include "ebb/comm/communicator.h"

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>
#include <string>

namespace c10d {
class Store;
}

namespace ebb::comm {

/// This process's place among the ranks, as its launcher states it.
struct LaunchEnvironment {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 1;
  std::string launcher = "none"; ///< "ebb", "torchrun", "srun", "mpirun", "none"
  std::string master_addr; ///< Host of the store; empty with a rendezvous file.
  int master_port = 0;
  std::string rendezvous_file; ///< For local ranks: a file in a folder that only this user can read.
  std::string token; ///< A rank without it is refused.
};

/// Reads RANK, WORLD_SIZE, ... (torchrun), SLURM_* (srun), OMPI_*/PMI_* (mpirun) or EBB_* (--nproc). A plain start gives
/// a world of one.
/// @throws ValueError when the variables contradict each other; names them.
LaunchEnvironment launch_environment();

struct GroupOptions {
  std::string backend = "auto"; ///< "auto": single for one rank, NCCL for CUDA builds with a GPU, else Gloo.
  std::chrono::milliseconds timeout = std::chrono::minutes(10); ///< For a live peer that does not arrive.
  std::chrono::milliseconds heartbeat = std::chrono::seconds(2); ///< Between signs of life.
  std::chrono::milliseconds dead_after = std::chrono::seconds(20); ///< Without a sign of life.
  std::chrono::milliseconds warn_after = std::chrono::seconds(30); ///< Waiting for a live peer.
  bool same_host_reads = true; ///< Gloo: let ranks of one host read each other's memory instead of sockets.
};

/// The group of all ranks of `environment`. Collective. The group lives as long as the last pointer to it.
/// @throws RankLostError or TimeoutError when not all ranks come.
std::shared_ptr<Communicator> init(const LaunchEnvironment& environment, const GroupOptions& options = {});

/// A group over an own store: ranks as threads (c10d::HashStore), subgroups, tests. Collective.
std::shared_ptr<Communicator> connect(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const GroupOptions& options = {});

/// A group of one. No network.
std::shared_ptr<Communicator> single();

} // namespace ebb::comm
