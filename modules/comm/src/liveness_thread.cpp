#include "liveness_state.h"

#include "ebb/base/error.h"
#include "ebb/base/log.h"

#include <algorithm>

namespace ebb::comm {

// Note [Signs of life]
// Every `heartbeat` each rank writes a counter and what it is doing, and reads those of a few peers
// (PeerWatch::kWatched) and the group's one loss report: one set and one multiGet, whatever the size of the group. A
// peer whose counter stands still for `dead_after` on the reader's clock is reported lost; clocks of two ranks are
// never compared. Everybody reads the report one heartbeat later. Who reports what:
// - a watcher, of a silent peer (stopped, frozen, unreachable, or killed where no launcher watches);
// - the launcher, as soon as a local rank has ended with an error;
// - a rank, of itself, when it fails.
// A rank that is merely late beats on, so that it is never lost however long it computes.
//
// Only the heartbeat thread touches the store: a call hangs for as long as the store's server is frozen, whatever
// timeout the client has, and must not hang the rank's work. Callers ask through State and wait with deadlines of their
// own. Where a rank serves the store, its end or its stop is the store's too, and no report can be read. So the end of
// the connection is that rank's loss, and so is, seen by a second thread, the guard, a call that hangs for
// `dead_after`.

namespace {

using namespace std::chrono_literals;
using Ms = std::chrono::milliseconds;

std::string beat_key(int rank) {
  return "liveness/beat/" + std::to_string(rank);
}

} // namespace

Liveness::State::State(
    const c10::intrusive_ptr<c10d::Store>& base, int rank, int size, const GroupOptions& options, OnLost on_lost)
    : rank(rank),
      size(size),
      options(options),
      store(base->clone()),
      on_lost(std::move(on_lost)),
      log_rank(log::rank()),
      watch(rank, size, options.heartbeat, options.dead_after),
      seen_at(static_cast<std::size_t>(size)) {}

void Liveness::State::run() {
  log::set_rank(log_rank >= 0 ? log_rank : rank);
  std::unique_lock lock(mutex);
  try {
    lock.unlock();
    store->compareSet(kLostKey, "", kNobodyLost);
    const auto served_by = store_host(store);
    lock.lock();
    host = served_by;
    if (host && *host != rank && !stop) {
      guard_thread = std::thread([this] { guard(); }); // joined before the state is let go
    }
    Ms pause = options.heartbeat;
    while (!stop) {
      round(lock);
      // With a broken connection the report of the cause may come any moment.
      pause = suspecting ? std::min<Ms>(options.heartbeat, std::max<Ms>(2 * pause, 20ms)) : options.heartbeat;
      const int suspecting_before = suspecting;
      wake.wait_for(lock, pause, [&] {
        return stop || scans_wanted > scans_done || words_wanted > words_said || suspecting > suspecting_before;
      });
      if (suspecting > suspecting_before) {
        pause = 0ms;
      }
    }
    lock.unlock();
    last_words();
    lock.lock();
  } catch (const std::exception& error) {
    if (!lock.owns_lock()) {
      lock.lock();
    }
    lose_store(lock, message_of(error));
  }
  finished = true;
  changed.notify_all();
  guard_wake.notify_all();
}

void Liveness::State::round(std::unique_lock<std::mutex>& lock) {
  const auto began = steady_now();
  ++mine.count;
  const auto text = mine.text();
  const bool failed = mine.state == Beat::State::kFailed;
  const auto report = failed ? std::optional<LossReport>({rank, "it failed: " + mine.why}) : accusation;
  const auto scans = scans_wanted;
  const auto words = words_wanted;
  std::vector<int> peers;
  if (scans > scans_done) {
    for (int peer = 0; peer < size; ++peer) {
      if (peer != rank) {
        peers.push_back(peer);
      }
    }
  } else {
    peers = watch.watched();
  }
  std::vector<bool> known(static_cast<std::size_t>(size));
  for (const int peer : peers) {
    known[peer] = watch.peer(peer).beat.has_value();
  }

  in_round = true;
  lock.unlock();
  store->set(beat_key(rank), text);
  // Reading waits for absent keys, so a peer is asked for only when it has written once.
  std::vector<std::string> keys{kLostKey};
  std::vector<int> asked;
  for (const int peer : peers) {
    if (known[peer] || store->check({beat_key(peer)})) {
      keys.push_back(beat_key(peer));
      asked.push_back(peer);
    }
  }
  const auto values = read(keys);
  std::optional<LossReport> found;
  if (values[0] != kNobodyLost) {
    found = LossReport::parse(values[0]);
  } else if (report) {
    found = report_loss(store, *report);
  }
  lock.lock();

  for (std::size_t i = 0; i < asked.size(); ++i) {
    auto beat = Beat::parse(values[i + 1]);
    const auto& before = watch.peer(asked[i]).beat;
    if (!before || before->count != beat.count) {
      seen_at[asked[i]] = steady_now();
    }
    if (beat.state == Beat::State::kFailed && !found) {
      found = LossReport{asked[i], "it failed: " + beat.why};
    }
    watch.saw(asked[i], std::move(beat));
  }
  watch.end_round(began - round_began);
  round_began = began;
  if (const auto silent = watch.silent(); silent && !found && lost < 0) {
    const LossReport report{
        silent->rank, fmt::format("no sign of life for {:.1f} s, last in ", silent->seconds) +
                          watch.peer(silent->rank).beat->activity() +
                          " (stopped, killed, or its host or network is down)"};
    lock.unlock();
    found = report_loss(store, report);
    lock.lock();
  }
  in_round = false;
  ++rounds;
  scans_done = std::max(scans_done, scans);
  words_said = std::max(words_said, words);
  if (found) {
    adopt(lock, *found);
  }
  changed.notify_all();
}

void Liveness::State::guard() {
  log::set_rank(log_rank >= 0 ? log_rank : rank);
  std::unique_lock lock(mutex);
  auto last = steady_now();
  auto seen = rounds;
  std::chrono::nanoseconds hanging{};
  while (!stop && !finished && lost < 0) {
    guard_wake.wait_for(lock, options.heartbeat, [&] { return stop || finished; });
    // As in PeerWatch: the time in which this process was stopped itself does not count.
    const auto elapsed = std::min<std::chrono::nanoseconds>(steady_now() - last, 2 * options.heartbeat);
    last = steady_now();
    if (rounds != seen || !in_round) {
      seen = rounds;
      hanging = {};
      continue;
    }
    hanging += elapsed;
    if (hanging > options.dead_after) {
      const double seconds = std::chrono::duration<double>(hanging).count();
      adopt(
          lock, {*host,
                 fmt::format(
                     "the store in its process has not answered for {:.1f} s (stopped, or its host or network is down)",
                     seconds)});
    }
  }
}

std::vector<std::string> Liveness::State::read(const std::vector<std::string>& keys) {
  std::vector<std::string> values;
  values.reserve(keys.size());
  if (store->hasExtendedApi()) {
    for (const auto& value : store->multiGet(keys)) {
      values.emplace_back(value.begin(), value.end());
    }
  } else {
    for (const auto& key : keys) {
      values.push_back(store->get_to_str(key));
    }
  }
  return values;
}

void Liveness::State::adopt(std::unique_lock<std::mutex>& lock, const LossReport& report) {
  if (lost >= 0 || report.rank < 0 || report.rank >= size) {
    return;
  }
  lost_why = report.why;
  lost = report.rank;
  changed.notify_all();
  if (on_lost && !stop) {
    lock.unlock();
    on_lost(report.rank, report.why);
    lock.lock();
  }
}

void Liveness::State::lose_store(std::unique_lock<std::mutex>& lock, const std::string& error) {
  store_error = error.substr(0, error.find('\n'));
  changed.notify_all();
  if (stop) {
    return;
  }
  if (!host || *host == rank) {
    log::warn(
        "the store is gone ({}): peers are not watched any more, and no rank can join; the group itself goes on until "
        "a connection breaks",
        store_error);
    return;
  }
  const auto& beat = watch.peer(*host).beat;
  if (beat && beat->state == Beat::State::kLeft) {
    log::debug("rank {} has left, and with it the store", *host);
    return;
  }
  adopt(lock, {*host, "its process, which serves the store, closed the connection (" + store_error + ")"});
}

void Liveness::State::last_words() {
  std::string text;
  std::optional<LossReport> report;
  {
    const std::lock_guard lock(mutex);
    ++mine.count;
    if (mine.state == Beat::State::kAlive) {
      mine.state = Beat::State::kLeft;
      mine.why = lost >= 0 ? "after the loss of rank " + std::to_string(lost) : "";
    }
    if (mine.state == Beat::State::kFailed && lost < 0) {
      report = LossReport{rank, "it failed: " + mine.why};
    }
    text = mine.text();
  }
  store->set(beat_key(rank), text);
  if (report) {
    report_loss(store, *report);
  }
  store->check({kLostKey}); // set() has no answer; with this one the store has got it
}

} // namespace ebb::comm
