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
  std::string master_addr{}; ///< Host name or address of the store.
  int master_port = 0;
  bool store_is_up = false; ///< The launcher hosts the store (--nproc, torchrun's agent); otherwise rank 0 does.
  std::string attempt = "0"; ///< Which start of the job this is, where the launcher restarts ranks on the same store.
  std::string token{}; ///< A rank with another one is refused.
};

/// Reads EBB_* (--nproc), RANK, WORLD_SIZE, ... (torchrun), OMPI_* (mpirun), SLURM_* (srun) or PMI_* (mpirun), in this
/// order: the innermost launcher counts. A plain start gives a world of one, and so does a batch script that Slurm runs
/// without srun.
///
/// MASTER_ADDR and MASTER_PORT are taken where they are set; otherwise srun's come from the node list and the job's id,
/// and ranks of mpirun that share one host meet on loopback. EBB_TOKEN sets the token; otherwise it is the job's id.
/// @throws ValueError when the variables contradict each other or are not numbers; names them and their values.
LaunchEnvironment launch_environment();

/// How a group is formed and watched.
struct GroupOptions {
  std::string backend = "auto"; ///< "auto": single for one rank, NCCL for CUDA builds with a GPU, else Gloo.
  std::chrono::milliseconds timeout = std::chrono::minutes(10); ///< For a live peer that does not arrive.
  std::chrono::milliseconds heartbeat = std::chrono::seconds(2); ///< Between signs of life.
  std::chrono::milliseconds dead_after = std::chrono::seconds(20); ///< Without a sign of life.
  std::chrono::milliseconds warn_after = std::chrono::seconds(30); ///< Waiting for a live peer.
  std::string address = "127.0.0.1"; ///< Of this host, where peers reach it. init() sets it from the environment.
  std::string host{}; ///< Name of this host; ranks that give the same one share a host. Empty: found by the system.
  bool same_host_reads = true; ///< Gloo: let ranks of one host read each other's memory instead of sockets.
};

/// The group of all ranks of `environment`. Collective. The group lives as long as the last pointer to it; where rank 0
/// hosts the store, its last pointer waits for the other ranks to leave, 30 s at most.
///
/// Local ranks meet and talk on loopback; others on the interface that GLOO_SOCKET_IFNAME names, or else on the one that
/// leads to MASTER_ADDR. The store listens on MASTER_ADDR only. EBB_HEARTBEAT_MS, EBB_DEAD_AFTER_MS and
/// EBB_HOST_ID override the options heartbeat, dead_after and host, and EBB_TIMEOUT_MS `timeout`. From here on SIGPIPE is
/// ignored and log lines of this thread carry the rank.
/// @throws ValueError when the token is not the job's, or another process has this rank already; TimeoutError, naming
///   them, when ranks do not come within options.timeout; RankLostError when one ends before all have come.
std::shared_ptr<Communicator> init(const LaunchEnvironment& environment, const GroupOptions& options = {});

/// A group over an own store: ranks as threads (c10d::HashStore), subgroups, tests. Collective.
///
/// How Gloo's ranks talk depends on where they are; Capabilities says which it is. On one host they read each other's
/// memory, or else send messages directly between all pairs; so they do with one rank a host. On several hosts with
/// several ranks, bytes cross once per host.
std::shared_ptr<Communicator> connect(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const GroupOptions& options = {});

/// A group of one. No network.
std::shared_ptr<Communicator> single();

} // namespace ebb::comm
