#include "liveness_watch.h"

#include <algorithm>
#include <array>
#include <charconv>

namespace ebb::comm {
namespace {

// Fields of a beat are separated by this and never hold it.
constexpr char kSeparator = '\n';

std::string field(std::string_view text, std::size_t limit) {
  std::string out(text.substr(0, limit));
  std::replace(out.begin(), out.end(), kSeparator, ' ');
  return out;
}

template <class Number>
Number number(std::string_view text, Number otherwise) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? value : otherwise;
}

} // namespace

std::string Beat::text() const {
  std::string out = std::to_string(count);
  for (const auto& part :
       {std::to_string(static_cast<int>(state)), std::to_string(sequence), std::to_string(step), field(op, 64),
        field(unit, 256), field(why, 2000)}) {
    out += kSeparator;
    out += part;
  }
  return out;
}

Beat Beat::parse(std::string_view text) {
  std::array<std::string_view, 7> parts;
  for (auto& part : parts) {
    const auto end = text.find(kSeparator);
    part = text.substr(0, end);
    text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
  }
  Beat beat;
  beat.count = number<std::uint64_t>(parts[0], 0);
  const int state = number<int>(parts[1], 0);
  beat.state = state == 1 ? State::kLeft : state == 2 ? State::kFailed : State::kAlive;
  beat.sequence = number<std::uint64_t>(parts[2], 0);
  beat.step = number<std::int64_t>(parts[3], -1);
  beat.op = parts[4];
  beat.unit = parts[5];
  beat.why = parts[6];
  return beat;
}

std::string Beat::activity() const {
  if (op.empty()) {
    return step < 0 ? "no operation yet" : "no operation yet, at step " + std::to_string(step);
  }
  return op + (unit.empty() ? "" : " of unit '" + unit + "'") + (step < 0 ? "" : " at step " + std::to_string(step));
}

PeerWatch::PeerWatch(int rank, int size, Duration heartbeat, Duration dead_after)
    : rank_(rank),
      size_(size),
      heartbeat_(heartbeat),
      dead_after_(dead_after),
      peers_(static_cast<std::size_t>(size)) {}

std::vector<int> PeerWatch::watched() const {
  std::vector<int> ranks;
  for (int i = 1; i < size_ && ranks.size() < kWatched; ++i) {
    const int candidate = (rank_ + i) % size_;
    const auto& beat = peer(candidate).beat;
    if (!beat || beat->state == Beat::State::kAlive) {
      ranks.push_back(candidate);
    }
  }
  return ranks;
}

void PeerWatch::saw(int rank, Beat beat) {
  auto& known = peers_[static_cast<std::size_t>(rank)];
  known.read_this_round = true;
  known.moved_this_round = known.moved_this_round || !known.beat || known.beat->count != beat.count;
  known.beat = std::move(beat);
}

void PeerWatch::end_round(Duration elapsed) {
  for (auto& peer : peers_) {
    if (peer.moved_this_round || !peer.watched_last_round) {
      peer.silence = Duration::zero(); // read for the first time, or again after a while: nothing to compare with
    } else if (peer.read_this_round) {
      peer.silence += std::min(elapsed, 2 * heartbeat_);
    }
    peer.watched_last_round = peer.read_this_round;
    peer.read_this_round = peer.moved_this_round = false;
  }
}

std::optional<PeerWatch::Silent> PeerWatch::silent() const {
  for (int rank = 0; rank < size_; ++rank) {
    const auto& known = peer(rank);
    if (known.beat && known.beat->state == Beat::State::kAlive && known.silence > dead_after_) {
      return Silent{rank, std::chrono::duration<double>(known.silence).count()};
    }
  }
  return std::nullopt;
}

int PeerWatch::first_plainly_left() const {
  for (int rank = 0; rank < size_; ++rank) {
    const auto& beat = peer(rank).beat;
    if (beat && beat->state == Beat::State::kLeft && beat->why.empty()) {
      return rank;
    }
  }
  return -1;
}

std::vector<int> PeerWatch::behind(std::uint64_t sequence) const {
  std::vector<int> ranks;
  for (int rank = 0; rank < size_; ++rank) {
    const auto& beat = peer(rank).beat;
    if (rank != rank_ && (!beat || beat->sequence < sequence)) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

} // namespace ebb::comm
