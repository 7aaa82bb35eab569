#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace ebb::comm {

/// How patient launch_local_ranks() is with ranks that must end.
struct LaunchOptions {
  /// How long, after a rank failed, the others may take to report it and end by themselves before SIGTERM comes.
  std::chrono::milliseconds leave = std::chrono::seconds(10);
  /// How long they may take after SIGTERM before SIGKILL comes.
  std::chrono::milliseconds grace = std::chrono::seconds(10);
};

/// Starts `nproc` copies of `argv` as local ranks and waits for them. SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are
/// forwarded; each rank gets them once, also when they come from a terminal. No rank outlives this process.
///
/// When a rank fails the others learn of it at once through the store, are told to stop (SIGTERM after options.leave,
/// SIGKILL after options.grace), and the exit code is that of the rank that failed first; 128 + n when it died of
/// signal n. Code 4 (lost peer) yields to that of the lost peer. A rank that ends with a code of its own, or by the
/// signal, after SIGINT, SIGTERM or SIGHUP was forwarded is not reported as failed; the exit code is the same. Where
/// standard output cannot be written, other than because its reader has left, a code of 0 becomes 1.
///
/// The store listens on loopback alone, in this process. Ranks find their place in EBB_RANK, EBB_WORLD_SIZE,
/// EBB_LOCAL_RANK, EBB_LOCAL_WORLD_SIZE, EBB_MASTER_ADDR, EBB_MASTER_PORT and EBB_TOKEN. OMP_NUM_THREADS is kept where
/// it is set, else it becomes the cores available divided by `nproc`, at least 1. Output passes through by whole lines;
/// on a terminal rank 0 writes to it directly, so that it can draw progress bars.
///
/// Signals that this process ignores, as SIGHUP under nohup, stay ignored here and in the ranks. Only one call may run
/// in a process at a time; the signals' actions are put back at its end.
///
/// @param nproc  1 .. 1024.
/// @param argv   Program (looked up in PATH when it has no slash) and arguments, run without a shell.
/// @return       The exit code for the launcher; 127 when the program cannot be run.
/// @throws ValueError when nproc is out of range, argv is empty, or another call is running.
int launch_local_ranks(int nproc, const std::vector<std::string>& argv, const LaunchOptions& options = {});

} // namespace ebb::comm
