#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace ebb::comm {

/// The file that `program` names, looked up in PATH when it has no slash; empty when there is none that can be run.
std::string find_program(const std::string& program);

/// How many threads each of `nproc` ranks gets: the cores this process may use divided by the ranks, at least 1.
int threads_per_rank(int nproc);

/// This process's environment with `changes` ("NAME=value") in place of what it had under these names.
std::vector<std::string> changed_environment(const std::vector<std::string>& changes);

/// A process to start.
struct Spawn {
  std::string program; ///< As find_program() returns it.
  std::vector<std::string> argv;
  std::vector<std::string> environment;
  int in = 0; ///< Becomes standard input, and so on.
  int out = 1;
  int err = 2;
};

/// Starts a process in a process group of its own, with no signals blocked. SIGPIPE is ignored there, and so is what is
/// ignored here. It is killed (SIGKILL) when the calling thread ends.
/// @throws c10::Error when the system has no room for it.
pid_t spawn(const Spawn& spec);

/// How a process ended.
struct Ending {
  int code = 0; ///< Its exit code; 128 + n when signal n ended it.
  bool crashed = false; ///< By a signal other than SIGINT, SIGTERM and SIGHUP.
  std::string text; ///< "it was killed by signal 9 (Killed)", "it ended with exit code 3"
};

/// Reaps `pid` if it has ended, and kills what is left of its process group.
/// @return  Whether it had ended.
bool reap(pid_t pid, Ending& ending);

} // namespace ebb::comm
