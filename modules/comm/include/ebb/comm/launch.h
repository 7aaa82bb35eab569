#pragma once

#include <string>
#include <vector>

namespace ebb::comm {

/// Starts `nproc` copies of `argv` as local ranks and waits for them. SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are
/// forwarded. When one rank fails the others are told to stop (SIGTERM, after a grace time SIGKILL) and the exit code is
/// that of the rank that failed first; 128 + n when it died of signal n.
///
/// @param argv  Program and arguments, run without a shell. The ranks find their place in the environment.
/// @return      The exit code for the launcher.
int launch_local_ranks(int nproc, const std::vector<std::string>& argv);

} // namespace ebb::comm
