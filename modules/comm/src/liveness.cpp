#include "liveness.h"

#include "ebb/base/error.h"
#include "ebb/base/log.h"

#include "liveness_state.h"

#include <algorithm>
#include <exception>

namespace ebb::comm {
namespace {

using namespace std::chrono_literals;
using Ms = std::chrono::milliseconds;

constexpr auto kStopPatience = 5s; // for the last words; the store may be frozen

std::string seconds_text(double seconds) {
  return fmt::format("{:.1f} s", seconds);
}

} // namespace

void Liveness::State::scan(std::unique_lock<std::mutex>& lock) {
  const auto wanted = ++scans_wanted;
  wake.notify_all();
  changed.wait_for(lock, std::max<Ms>(2 * options.heartbeat, 1s), [&] { return scans_done >= wanted || finished; });
}

std::string Liveness::State::describe_known(int peer) const {
  const auto name = "rank " + std::to_string(peer);
  if (peer == rank) {
    return name + " (this rank, in " + mine.activity() + ")";
  }
  if (peer == lost) {
    return name + " (lost: " + lost_why + ")";
  }
  const auto& known = watch.peer(peer);
  if (!known.beat) {
    return name + (store_error.empty() ? " (not seen yet)" : " (not seen; the store is gone)");
  }
  const auto& beat = *known.beat;
  const auto seen =
      seen_at[peer] ? ", last seen " + seconds_text(seconds_between(*seen_at[peer], steady_now())) + " ago" : "";
  switch (beat.state) {
    case Beat::State::kLeft:
      return name + " (left the group" + (beat.why.empty() ? "" : " " + beat.why) + ", last in " + beat.activity() +
             ")";
    case Beat::State::kFailed:
      return name + " (failed: " + beat.why + ")";
    case Beat::State::kAlive:
      break;
  }
  const char* state = !store_error.empty() ? "(not watched, the store is gone"
                      : known.silence > 3 * std::chrono::nanoseconds(options.heartbeat) ? "(silent"
                                                                                        : "(alive";
  return name + " " + state + seen + " in " + beat.activity() + ")";
}

std::string Liveness::State::here(std::string_view op, std::string_view unit) const {
  Beat beat;
  beat.op = op;
  beat.unit = unit;
  beat.step = mine.step;
  return beat.activity();
}

void Liveness::State::throw_lost(std::string_view op, std::string_view unit) const {
  const int who = lost;
  const auto subject = who == rank ? "this rank (" + std::to_string(who) + ") was given up by its peers"
                                   : "rank " + std::to_string(who) + " was lost";
  EBB_THROW_RANK_LOST(
      who, "[", op, "] ", subject, ": ", lost_why, ". Rank ", rank, " was in ", here(op, unit),
      ". The group cannot be used any more; see the lost rank's own messages, and restart the job from its last "
      "checkpoint");
}

Liveness::Liveness(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const GroupOptions& options, OnLost on_lost) {
  TORCH_CHECK_VALUE(
      size >= 1 && rank >= 0 && rank < size, "[connect] rank must be 0 to size - 1, got rank ", rank, " of ", size);
  TORCH_CHECK_VALUE(
      options.heartbeat > 0ms && options.dead_after >= 2 * options.heartbeat,
      "[connect] dead_after must be at least two heartbeats, got heartbeat ", options.heartbeat.count(),
      " ms and dead_after ", options.dead_after.count(), " ms");
  state_ = std::make_shared<State>(store, rank, size, options, std::move(on_lost));
  // The thread keeps the state alive: it may have to be left behind in a call of a frozen store.
  state_->thread = std::thread([state = state_] { state->run(); });
}

Liveness::~Liveness() {
  std::unique_lock lock(state_->mutex);
  const bool in_trouble = std::uncaught_exceptions() > 0 || !state_->trouble.empty();
  if (in_trouble && state_->lost < 0 && state_->mine.state == Beat::State::kAlive) {
    state_->mine.state = Beat::State::kFailed;
    state_->mine.why = state_->trouble.empty() ? "an exception ended it; see its own messages" : state_->trouble;
  }
  state_->stop = true;
  state_->wake.notify_all();
  state_->guard_wake.notify_all();
  // A store that is known to hang is not waited for again.
  const bool hangs = state_->host && state_->lost == *state_->host;
  const bool ended =
      state_->changed.wait_for(lock, hangs ? Ms(500) : Ms(kStopPatience), [&] { return state_->finished; });
  lock.unlock();
  if (state_->guard_thread.joinable()) {
    state_->guard_thread.join();
  }
  if (ended) {
    state_->thread.join();
  } else {
    if (!hangs) {
      log::warn("the store does not answer; leaving the group without a goodbye");
    }
    state_->thread.detach();
  }
}

std::uint64_t Liveness::begin(std::string_view op, std::string_view unit, std::int64_t step) {
  const std::lock_guard lock(state_->mutex);
  state_->mine.op = op;
  state_->mine.unit = unit;
  if (step >= 0) {
    state_->mine.step = step;
  }
  return ++state_->mine.sequence;
}

void Liveness::set_step(std::int64_t step) {
  const std::lock_guard lock(state_->mutex);
  state_->mine.step = step;
}

void Liveness::fail(const std::string& why) noexcept {
  try {
    std::unique_lock lock(state_->mutex);
    if (state_->mine.state == Beat::State::kFailed) {
      return;
    }
    state_->mine.state = Beat::State::kFailed;
    state_->mine.why = why;
    const auto wanted = ++state_->words_wanted;
    state_->wake.notify_all();
    if (std::this_thread::get_id() != state_->thread.get_id()) {
      state_->changed.wait_for(lock, 1s, [&] { return state_->words_said >= wanted || state_->finished; });
    }
  } catch (...) {
    // Peers will miss this rank's signs of life instead.
  }
}

int Liveness::lost_rank() const {
  return state_->lost;
}

std::string Liveness::lost_reason() const {
  const std::lock_guard lock(state_->mutex);
  return state_->lost_why;
}

std::string Liveness::describe(int rank) const {
  std::unique_lock lock(state_->mutex);
  state_->scan(lock);
  return state_->describe_known(rank);
}

void Liveness::wait(
    const std::function<bool()>& done, std::string_view op, std::string_view unit, std::uint64_t sequence) {
  auto& state = *state_;
  const auto began = steady_now();
  auto next_warning = began + state.options.warn_after;
  Ms warning_pause = state.options.warn_after;
  auto pause = std::chrono::microseconds(10);
  const auto latecomers = [&](std::unique_lock<std::mutex>& lock) {
    state.scan(lock);
    const auto ranks = state.watch.behind(sequence ? sequence : state.mine.sequence);
    std::string text;
    for (std::size_t i = 0; i < ranks.size() && i < 8; ++i) {
      text += (i ? ", " : "") + state.describe_known(ranks[i]);
    }
    if (ranks.size() > 8) {
      text += " and " + std::to_string(ranks.size() - 8) + " more";
    }
    return text.empty() ? std::string("all ranks have come to it, but it does not end") : "not there yet: " + text;
  };
  for (;;) {
    try {
      if (done()) {
        return;
      }
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      broken(op, unit, message_of(error));
    }
    if (state.lost >= 0) {
      const std::lock_guard lock(state.mutex);
      state.throw_lost(op, unit);
    }
    const auto time = steady_now();
    if (time > began + state.options.timeout) {
      std::unique_lock lock(state.mutex);
      const auto who = latecomers(lock);
      if (state.lost >= 0) {
        state.throw_lost(op, unit);
      }
      state.trouble = fmt::format(
          "it waited for {} in {}; {}", seconds_text(seconds_between(began, steady_now())), state.here(op, unit), who);
      EBB_THROW(
          TimeoutError, "[", op, "] rank ", state.rank, " waited ", seconds_text(seconds_between(began, steady_now())),
          " in ", state.here(op, unit), "; ", who,
          ". Check that all ranks make the same calls in the same order, or raise the timeout");
    }
    if (time > next_warning) {
      std::unique_lock lock(state.mutex);
      const auto text = fmt::format(
          "waiting for {} in {}; {}", seconds_text(seconds_between(began, time)), state.here(op, unit),
          latecomers(lock));
      lock.unlock();
      log::warn("{}", text);
      warning_pause *= 2;
      next_warning = time + warning_pause;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::microseconds(1000));
  }
}

void Liveness::broken(std::string_view op, std::string_view unit, const std::string& cause) {
  auto& state = *state_;
  std::unique_lock lock(state.mutex);
  ++state.suspecting;
  const auto began = steady_now();
  const auto patience = state.options.dead_after + 4 * state.options.heartbeat + 1s;
  int left = -1;
  state.scan(lock);
  // A rank that left because of the one that is really lost may be seen first: give the report one heartbeat.
  auto look_again = began + state.options.heartbeat;
  while (state.lost < 0 && !state.finished && left < 0 && steady_now() < began + patience) {
    state.changed.wait_until(lock, std::min(look_again, began + patience));
    if (steady_now() >= look_again) {
      state.scan(lock);
      left = state.watch.first_plainly_left();
      look_again = steady_now() + 4 * state.options.heartbeat;
    }
  }
  --state.suspecting;
  const auto where = state.here(op, unit);
  if (state.lost < 0 && left >= 0) {
    // The others must hear of it before this rank is gone as well, or they would blame this one.
    state.accusation = LossReport{
        left, "it left the group, its last operation being " + state.watch.peer(left).beat->activity() +
                  ", while rank " + std::to_string(state.rank) + " was in " + where +
                  "; check that all ranks make the same calls (" + cause + ")"};
    const auto wanted = ++state.words_wanted;
    state.wake.notify_all();
    state.changed.wait_for(lock, 1s, [&] { return state.words_said >= wanted || state.finished; });
    if (state.lost < 0) {
      EBB_THROW_RANK_LOST(left, "[", op, "] rank ", left, " was lost: ", state.accusation->why);
    }
  }
  if (state.lost >= 0) {
    state.throw_lost(op, unit);
  }
  state.trouble = "a connection of it broke in " + where + " (" + cause + ")";
  EBB_THROW_RANK_LOST(
      -1, "[", op, "] a connection broke (", cause, ") while rank ", state.rank, " was in ", where, "; ",
      state.store_error.empty()
          ? std::string("all peers still give signs of life, so the network between them is to blame")
          : "the store is gone as well (" + state.store_error + "), so the lost peer is not known",
      ". The group cannot be used any more; restart the job from its last checkpoint");
}

} // namespace ebb::comm
