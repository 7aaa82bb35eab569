#include "ebb/comm/launch.h"

#include "ebb/base/clock.h"
#include "ebb/base/error.h"
#include "ebb/base/log.h"

#include "launch_output.h"
#include "launch_process.h"
#include "rendezvous.h"
#include "rendezvous_token.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <list>
#include <optional>
#include <utility>

namespace ebb::comm {
namespace {

using namespace std::chrono_literals;

constexpr int kMostRanks = 1024;
constexpr auto kTick = 100ms; // the longest sleep; deadlines are looked at this often
constexpr std::array kHandled{SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGTSTP};

// A handler reaches nothing but a global: the end of a pipe that Signals reads. -1: no launcher runs.
std::atomic<int> signal_writer{-1};

void note_signal(int signal) {
  const int saved = errno;
  const auto byte = static_cast<unsigned char>(signal);
  [[maybe_unused]] const auto written = ::write(signal_writer.load(), &byte, 1);
  errno = saved;
}

/// Turns signals into reads of a file descriptor, and puts everything back at the end. By handlers, not by signalfd:
/// that would miss what the system delivers to other threads of the process.
class Signals {
 public:
  Signals() {
    std::array<int, 2> ends{};
    TORCH_CHECK(
        ::pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) == 0,
        "[launch_local_ranks] cannot make a pipe: ", std::strerror(errno));
    reader_ = ends[0];
    writer_ = ends[1];
    int none = -1;
    if (!signal_writer.compare_exchange_strong(none, writer_)) {
      ::close(reader_);
      ::close(writer_);
      TORCH_CHECK_VALUE(
          false, "[launch_local_ranks] this process is already launching ranks; wait for that call to return");
    }
    take(SIGPIPE, SIG_IGN);
    take(SIGCHLD, note_signal); // also where it was ignored: ranks would vanish before their exit code is read
    for (const int signal : kHandled) {
      struct sigaction now {};
      ::sigaction(signal, nullptr, &now);
      if (now.sa_handler != SIG_IGN) { // as under nohup, or in the background of a script
        take(signal, note_signal);
      }
    }
  }
  ~Signals() {
    for (const auto& [signal, action] : old_) {
      ::sigaction(signal, &action, nullptr);
    }
    signal_writer = -1;
    ::close(reader_);
    ::close(writer_);
  }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  int fd() const {
    return reader_;
  }
  std::optional<int> next() const {
    unsigned char byte = 0;
    return ::read(reader_, &byte, 1) == 1 ? std::optional<int>(byte) : std::nullopt;
  }

 private:
  void take(int signal, void (*handler)(int)) {
    struct sigaction action {};
    struct sigaction old {};
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART;
    ::sigaction(signal, &action, &old);
    old_.emplace_back(signal, old);
  }

  int reader_ = -1;
  int writer_ = -1;
  std::vector<std::pair<int, struct sigaction>> old_;
};

/// All ranks of one job on this host, from their start to the last one's end.
class Launcher {
 public:
  Launcher(int nproc, const std::vector<std::string>& argv, const LaunchOptions& options)
      : nproc_(nproc), argv_(argv), options_(options), pids_(static_cast<std::size_t>(nproc), -1) {}

  ~Launcher() {
    signal_all(SIGKILL);
    Ending ending;
    for (const pid_t pid : pids_) {
      while (pid > 0 && !reap(pid, ending)) {
        ::poll(nullptr, 0, 1);
      }
    }
  }
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  int run() {
    const auto program = find_program(argv_[0]);
    if (program.empty()) {
      log::error("cannot run '{}': no such program; give its path, or a name that is found in PATH", argv_[0]);
      return 127;
    }
    open_rendezvous();
    start(program);
    while (running_ > 0) {
      poll_once();
      while (const auto signal = signals_.next()) {
        handle(*signal);
      }
      reap_ended();
      enforce_deadlines();
    }
    for (auto& pipe : pipes_) {
      pipe.finish();
      if (pipe.to() == STDOUT_FILENO && pipe.error() != 0 && !output_lost_) {
        output_lost_ = true;
        log::error(
            "standard output of the ranks is incomplete: {}; make room where it goes", std::strerror(pipe.error()));
      }
    }
    return exit_code_ == 0 && output_lost_ ? static_cast<int>(ExitCode::kFailure) : exit_code_;
  }

 private:
  void open_rendezvous() {
    token_ = random_token();
    const auto hosted = host_store({"127.0.0.1"}, 0);
    port_ = hosted.port;
    open_job(hosted.store, token_, "0");
    job_ = enter_job(hosted.store, token_, "0", steady_now() + 1min);
  }

  void start(const std::string& program) {
    std::vector<std::string> shared{
        "EBB_WORLD_SIZE=" + std::to_string(nproc_), "EBB_LOCAL_WORLD_SIZE=" + std::to_string(nproc_),
        "EBB_MASTER_ADDR=127.0.0.1", "EBB_MASTER_PORT=" + std::to_string(port_), "EBB_TOKEN=" + token_};
    if (const char* threads = std::getenv("OMP_NUM_THREADS"); !threads || !*threads) {
      shared.push_back("OMP_NUM_THREADS=" + std::to_string(threads_per_rank(nproc_)));
    }
    const int nothing = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    for (int rank = 0; rank < nproc_; ++rank) {
      Spawn spec{.program = program, .argv = argv_, .environment = {}};
      auto changes = shared;
      changes.push_back("EBB_RANK=" + std::to_string(rank));
      changes.push_back("EBB_LOCAL_RANK=" + std::to_string(rank));
      spec.environment = changed_environment(changes);
      // Rank 0 reads what is piped in. A terminal's input is the launcher's: a background process that reads it stops.
      spec.in = rank == 0 && !::isatty(STDIN_FILENO) ? STDIN_FILENO : nothing;
      spec.out = output_of(rank, STDOUT_FILENO);
      spec.err = output_of(rank, STDERR_FILENO);
      pids_[rank] = spawn(spec);
      ++running_;
      for (auto& pipe : pipes_) {
        pipe.close_writer();
      }
    }
    ::close(nothing);
    log::debug("started {} ranks of {}, store on 127.0.0.1:{}", nproc_, program, port_);
  }

  int output_of(int rank, int fd) {
    const bool terminal = ::isatty(fd);
    if (rank == 0 && terminal) {
      return fd;
    }
    return pipes_.emplace_back(fd, terminal ? "\r\x1b[K" : "").writer();
  }

  void poll_once() {
    std::vector<pollfd> waiting{{.fd = signals_.fd(), .events = POLLIN, .revents = 0}};
    for (const auto& pipe : pipes_) {
      waiting.push_back({.fd = pipe.reader(), .events = POLLIN, .revents = 0});
    }
    ::poll(waiting.data(), waiting.size(), static_cast<int>(std::chrono::milliseconds(kTick).count()));
    for (auto& pipe : pipes_) {
      pipe.pump();
    }
  }

  void handle(int signal) {
    if (signal == SIGTSTP) { // the terminal's Ctrl-Z reaches this process only: stop and go on together
      signal_all(SIGSTOP);
      ::raise(SIGSTOP);
      signal_all(SIGCONT);
    } else if (signal != SIGCHLD) {
      log::debug("forwarding signal {} to {} ranks", signal, running_);
      asked_to_end_ = asked_to_end_ || signal == SIGINT || signal == SIGTERM || signal == SIGHUP;
      signal_all(signal);
    }
  }

  void signal_all(int signal) {
    for (const pid_t pid : pids_) {
      if (pid > 0) {
        ::kill(signal == SIGKILL || signal == SIGSTOP || signal == SIGCONT ? -pid : pid, signal);
      }
    }
  }

  void reap_ended() {
    for (int rank = 0; rank < nproc_; ++rank) {
      Ending ending;
      if (pids_[rank] > 0 && reap(pids_[rank], ending)) {
        pids_[rank] = -1;
        --running_;
        on_end(rank, ending);
      }
    }
  }

  void on_end(int rank, const Ending& ending) {
    const bool failed = ending.code != 0;
    if (running_ > 0) {
      try {
        report_end(job_, rank, failed, ending.text);
      } catch (const std::exception& error) {
        log::warn("cannot tell the other ranks that rank {} has ended: {}", rank, message_of(error));
      }
    }
    if (!failed || stopping_) {
      return;
    }
    const bool first = exit_code_ == 0;
    // A rank that reports a lost peer may be reaped before that peer.
    constexpr int kLostPeer = static_cast<int>(ExitCode::kLostPeer);
    if (first || (exit_code_ == kLostPeer && ending.code != kLostPeer)) {
      exit_code_ = ending.code;
    }
    if (first) {
      stop_at_ = steady_now() + options_.leave;
      if (asked_to_end_ && !ending.crashed) { // what it was asked to do; it has said itself what that meant
        log::debug("rank {} ended after a forwarded signal: {}", rank, ending.text);
      } else {
        log::error("rank {} failed: {}{}", rank, ending.text, running_ ? "; the other ranks are told to end" : "");
      }
    }
  }

  void enforce_deadlines() {
    if (stop_at_ && !stopping_ && steady_now() > *stop_at_) {
      stopping_ = true;
      kill_at_ = steady_now() + options_.grace;
      signal_all(SIGTERM);
      signal_all(SIGCONT); // one that is stopped would not see the other
    }
    if (kill_at_ && steady_now() > *kill_at_) {
      kill_at_.reset();
      log::warn("killing those that did not end after SIGTERM: {}", running_);
      signal_all(SIGKILL);
    }
  }

  const int nproc_;
  const std::vector<std::string>& argv_;
  const LaunchOptions options_;
  Signals signals_;
  std::string token_;
  int port_ = 0;
  StorePtr job_;
  std::list<LinePipe> pipes_;
  std::vector<pid_t> pids_; // -1 once ended
  int running_ = 0;
  int exit_code_ = 0;
  bool output_lost_ = false;
  bool asked_to_end_ = false; // by a signal that was forwarded
  bool stopping_ = false;
  std::optional<Clock::TimePoint> stop_at_;
  std::optional<Clock::TimePoint> kill_at_;
};

} // namespace

int launch_local_ranks(int nproc, const std::vector<std::string>& argv, const LaunchOptions& options) {
  TORCH_CHECK_VALUE(
      nproc >= 1 && nproc <= kMostRanks, "[launch_local_ranks] nproc must be 1 to ", kMostRanks, ", got ", nproc);
  TORCH_CHECK_VALUE(
      !argv.empty(), "[launch_local_ranks] argv must name the program to start, got none; give at least its path");
  return Launcher(nproc, argv, options).run();
}

} // namespace ebb::comm
