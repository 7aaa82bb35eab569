#include "job.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <fstream>
#include <stdexcept>
#include <thread>

namespace ebb::test {
namespace {

using namespace std::chrono_literals;

constexpr auto kPatience = 60s;

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> out;
  for (const auto& text : texts) {
    out.push_back(const_cast<char*>(text.c_str()));
  }
  out.push_back(nullptr);
  return out;
}

template <class Condition>
bool within_ten_seconds(const Condition& condition) {
  const auto limit = std::chrono::steady_clock::now() + 10s;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > limit) {
      return false;
    }
    std::this_thread::sleep_for(10ms);
  }
  return true;
}

} // namespace

Job::Job(const std::vector<std::string>& argv, const std::vector<std::string>& changes, bool terminal) {
  std::vector<std::string> environment;
  for (char** entry = environ; *entry; ++entry) {
    const std::string old = *entry;
    const auto name = old.substr(0, old.find('=') + 1);
    bool replaced = false;
    for (const auto& change : changes) {
      replaced = replaced || change.starts_with(name);
    }
    if (!replaced) {
      environment.push_back(old);
    }
  }
  environment.insert(environment.end(), changes.begin(), changes.end());

  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawnattr_init(&attributes);
  int write_end = -1;
  if (terminal) {
    fd_ = ::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    std::array<char, 64> name{};
    if (fd_ < 0 || ::grantpt(fd_) != 0 || ::unlockpt(fd_) != 0 || ::ptsname_r(fd_, name.data(), name.size()) != 0) {
      throw std::runtime_error("no terminal");
    }
    ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID);
    ::posix_spawn_file_actions_addopen(&actions, 0, name.data(), O_RDWR, 0); // becomes the new session's terminal
    ::posix_spawn_file_actions_adddup2(&actions, 0, 1);
    ::posix_spawn_file_actions_adddup2(&actions, 0, 2);
  } else {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
      throw std::runtime_error("no pipe");
    }
    fd_ = ends[0];
    write_end = ends[1];
    ::posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    ::posix_spawn_file_actions_adddup2(&actions, write_end, 1);
    ::posix_spawn_file_actions_adddup2(&actions, write_end, 2);
  }
  const auto arguments = pointers(argv);
  const auto variables = pointers(environment);
  const int error = ::posix_spawn(&pid_, argv[0].c_str(), &actions, &attributes, arguments.data(), variables.data());
  ::posix_spawn_file_actions_destroy(&actions);
  ::posix_spawnattr_destroy(&attributes);
  if (write_end >= 0) {
    ::close(write_end);
  }
  if (error != 0) {
    throw std::runtime_error("cannot start " + argv[0]);
  }
}

Job::~Job() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  ::close(fd_);
}

void Job::signal(int signal) const {
  ::kill(pid_, signal);
}

void Job::type(const std::string& keys) const {
  if (::write(fd_, keys.data(), keys.size()) != static_cast<ssize_t>(keys.size())) {
    throw std::runtime_error("the terminal takes no input");
  }
}

bool Job::read_more(std::chrono::milliseconds limit) {
  if (ended_) {
    std::this_thread::sleep_for(limit);
    return false;
  }
  pollfd waiting{.fd = fd_, .events = POLLIN, .revents = 0};
  if (::poll(&waiting, 1, static_cast<int>(limit.count())) != 1) {
    return false;
  }
  std::array<char, 4096> buffer{};
  const auto count = ::read(fd_, buffer.data(), buffer.size());
  if (count <= 0) {
    ended_ = true;
    return false;
  }
  pending_.append(buffer.data(), static_cast<std::size_t>(count));
  for (auto end = pending_.find('\n'); end != std::string::npos; end = pending_.find('\n')) {
    lines_.push_back(pending_.substr(0, end));
    pending_.erase(0, end + 1);
  }
  return true;
}

std::string Job::wait_for(const std::string& text) {
  const auto limit = std::chrono::steady_clock::now() + kPatience;
  std::size_t next = 0;
  for (;;) {
    for (; next < lines_.size(); ++next) {
      if (lines_[next].find(text) != std::string::npos) {
        return lines_[next];
      }
    }
    if (ended_ || std::chrono::steady_clock::now() > limit) {
      return "";
    }
    read_more(100ms);
  }
}

pid_t Job::pid_of_rank(int rank) {
  const auto start = "rank " + std::to_string(rank) + " pid ";
  const auto line = wait_for(start);
  if (line.empty()) {
    throw std::runtime_error("rank " + std::to_string(rank) + " did not start: " + output());
  }
  return std::stoi(line.substr(line.find(start) + start.size()));
}

int Job::wait(std::chrono::seconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  int status = 0;
  while (::waitpid(pid_, &status, WNOHANG) != pid_) {
    if (std::chrono::steady_clock::now() > end) {
      return -1;
    }
    read_more(20ms);
  }
  pid_ = -1;
  while (read_more(0ms)) {}
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

std::vector<std::string> Job::lines_with(const std::string& text) const {
  std::vector<std::string> found;
  for (const auto& line : lines_) {
    if (line.find(text) != std::string::npos) {
      found.push_back(line);
    }
  }
  return found;
}

std::string Job::output() const {
  std::string all;
  for (const auto& line : lines_) {
    all += line + "\n";
  }
  return all;
}

char state_of(pid_t pid) {
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string text((std::istreambuf_iterator<char>(stat)), std::istreambuf_iterator<char>());
  const auto name_end = text.rfind(") ");
  return name_end == std::string::npos ? '\0' : text[name_end + 2];
}

bool all_come_to(char state, const std::vector<pid_t>& pids) {
  return within_ten_seconds(
      [&] { return std::all_of(pids.begin(), pids.end(), [&](pid_t pid) { return state_of(pid) == state; }); });
}

bool outlives(pid_t pid) {
  return !within_ten_seconds([&] {
    const char state = state_of(pid);
    return state == '\0' || state == 'Z' || state == 'X';
  });
}

} // namespace ebb::test
