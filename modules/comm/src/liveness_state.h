#pragma once

#include "liveness.h"

#include "ebb/base/clock.h"

#include "liveness_report.h"
#include "liveness_watch.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace ebb::comm {

/// What the heartbeat thread (liveness_thread.cpp) and its callers (liveness.cpp) share.
struct Liveness::State {
  State(const c10::intrusive_ptr<c10d::Store>& base, int rank, int size, const GroupOptions& options, OnLost on_lost);

  void run(); // the heartbeat thread
  void guard(); // the guard thread, where a rank serves the store
  void round(std::unique_lock<std::mutex>& lock);
  std::vector<std::string> read(const std::vector<std::string>& keys);
  void adopt(std::unique_lock<std::mutex>& lock, const LossReport& report);
  void lose_store(std::unique_lock<std::mutex>& lock, const std::string& error);
  void last_words();

  /// Has every peer's beat read, and waits for it, for two heartbeats at most.
  void scan(std::unique_lock<std::mutex>& lock);
  std::string describe_known(int peer) const;
  [[noreturn]] void throw_lost(std::string_view op, std::string_view unit) const;
  std::string here(std::string_view op, std::string_view unit) const;

  const int rank;
  const int size;
  const GroupOptions options;
  const c10::intrusive_ptr<c10d::Store> store; // a client of its own; of the heartbeat thread
  const OnLost on_lost;
  const int log_rank;
  std::thread thread;
  std::thread guard_thread; // started, under the mutex, by the heartbeat thread
  std::atomic<int> lost{-1};

  // Everything below is guarded. Never held during a call of the store or of on_lost.
  mutable std::mutex mutex;
  std::condition_variable wake; // the heartbeat thread has something to do
  std::condition_variable changed; // a round has ended, or something was found
  std::condition_variable guard_wake; // the end has come
  Beat mine;
  PeerWatch watch;
  std::vector<std::optional<Clock::TimePoint>> seen_at; // when a peer's counter was last seen to move
  std::optional<int> host; // whose process serves the store, if a rank's
  std::string lost_why;
  std::string store_error; // not empty: the store is gone
  std::uint64_t scans_wanted = 0;
  std::uint64_t scans_done = 0;
  std::uint64_t words_wanted = 0; // beats that a caller waits for
  std::uint64_t words_said = 0;
  int suspecting = 0; // callers with a broken connection
  std::optional<LossReport> accusation; // what a caller found out, for the others
  std::string trouble; // what this rank ran into without anybody being lost; its reason if it leaves now
  std::uint64_t rounds = 0; // ended
  bool in_round = false; // the heartbeat thread is in calls of the store
  bool stop = false;
  bool finished = false;
  Clock::TimePoint round_began = std::chrono::steady_clock::now();
};

} // namespace ebb::comm
