#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

namespace ebb::test {

/// A program started for a test, its output read line by line. Killed, with the ranks it started, at the end of the
/// test.
class Job {
 public:
  /// @param argv     The program and its arguments.
  /// @param changes  "NAME=value" in its environment, beyond this process's.
  /// @param terminal Run it in a session of its own on a terminal of its own.
  explicit Job(
      const std::vector<std::string>& argv, const std::vector<std::string>& changes = {}, bool terminal = false);
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  pid_t pid() const {
    return pid_;
  }
  void signal(int signal) const;
  /// Types at the terminal.
  void type(const std::string& keys) const;

  /// Waits until a line holds `text`, 60 s at most.
  /// @return  The first such line; empty when none came.
  std::string wait_for(const std::string& text);
  /// The process that rank `rank` said it is; waits for it to say so.
  pid_t pid_of_rank(int rank);
  /// Waits for the program to end.
  /// @return  Its exit code, 128 + n after signal n; -1 after `limit`.
  int wait(std::chrono::seconds limit = std::chrono::seconds(60));

  /// All lines so far, both streams.
  const std::vector<std::string>& lines() const {
    return lines_;
  }
  /// Those that hold `text`.
  std::vector<std::string> lines_with(const std::string& text) const;
  std::string output() const;

 private:
  bool read_more(std::chrono::milliseconds limit);

  pid_t pid_ = -1;
  int fd_ = -1;
  bool ended_ = false; // its output, that is
  std::string pending_;
  std::vector<std::string> lines_;
};

/// 'R', 'S', 'T', ... as /proc says; 0 when there is no such process.
char state_of(pid_t pid);
/// Waits until all are in `state`, 10 s at most.
bool all_come_to(char state, const std::vector<pid_t>& pids);
/// Whether a process is still there, zombies not counted; waits up to 10 s for its end.
bool outlives(pid_t pid);

} // namespace ebb::test
