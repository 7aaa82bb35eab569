#include "launch_process.h"

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <string_view>

namespace ebb::comm {
namespace {

bool can_run(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode) && ::access(path.c_str(), X_OK) == 0;
}

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> out;
  out.reserve(texts.size() + 1);
  for (const auto& text : texts) {
    out.push_back(const_cast<char*>(text.c_str()));
  }
  out.push_back(nullptr);
  return out;
}

// dup2 onto itself would leave close-on-exec set.
void become(int from, int to) {
  if (from != to) {
    ::dup2(from, to);
  }
}

} // namespace

std::string find_program(const std::string& program) {
  if (program.find('/') != std::string::npos) {
    return can_run(program) ? program : "";
  }
  const char* path = std::getenv("PATH");
  std::string_view rest = path ? path : "/usr/bin:/bin";
  while (!program.empty()) {
    const auto colon = rest.find(':');
    const auto folder = rest.substr(0, colon);
    const auto candidate = std::string(folder.empty() ? "." : folder) + "/" + program;
    if (can_run(candidate)) {
      return candidate;
    }
    if (colon == std::string_view::npos) {
      break;
    }
    rest = rest.substr(colon + 1);
  }
  return "";
}

int threads_per_rank(int nproc) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  const int count = ::sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
  return std::max(1, count / nproc);
}

std::vector<std::string> changed_environment(const std::vector<std::string>& changes) {
  std::vector<std::string> out;
  for (char** entry = environ; *entry; ++entry) {
    const std::string_view old(*entry);
    const auto name = old.substr(0, old.find('=') + 1);
    if (std::none_of(
            changes.begin(), changes.end(), [&](const std::string& change) { return change.starts_with(name); })) {
      out.emplace_back(old);
    }
  }
  out.insert(out.end(), changes.begin(), changes.end());
  return out;
}

pid_t spawn(const Spawn& spec) {
  // All memory that the child needs is made here: between fork and exec it may only make system calls, because other
  // threads may hold the allocator's lock.
  const auto argv = pointers(spec.argv);
  const auto envp = pointers(spec.environment);
  const char* path = spec.program.c_str();
  const pid_t parent = ::getpid();
  sigset_t none;
  ::sigemptyset(&none);

  const pid_t pid = ::fork();
  TORCH_CHECK(pid >= 0, "[launch_local_ranks] cannot start another process: ", std::strerror(errno));
  if (pid > 0) {
    ::setpgid(pid, pid); // here as well, so that it holds before the first signal is forwarded
    return pid;
  }
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) {
    ::_exit(127); // the launcher ended before the line above
  }
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGTTOU, SIG_IGN); // rank 0 may draw on a terminal from the background group that it is in
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  become(spec.in, STDIN_FILENO);
  become(spec.out, STDOUT_FILENO);
  become(spec.err, STDERR_FILENO);
  ::execve(path, argv.data(), envp.data());
  ::_exit(127);
}

bool reap(pid_t pid, Ending& ending) {
  siginfo_t info{};
  // Look first and reap later: as long as the zombie is there, its process group's number cannot be another's.
  if (::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) {
    return false;
  }
  ::kill(-pid, SIGKILL);
  int status = 0;
  ::waitpid(pid, &status, 0);
  if (WIFSIGNALED(status)) {
    const int signal = WTERMSIG(status);
    ending.code = 128 + signal;
    ending.crashed = signal != SIGINT && signal != SIGTERM && signal != SIGHUP;
    ending.text = "it was killed by signal " + std::to_string(signal) + " (" + ::strsignal(signal) + ")";
  } else {
    ending.code = WEXITSTATUS(status);
    ending.text = "it ended with exit code " + std::to_string(ending.code);
  }
  return true;
}

} // namespace ebb::comm
