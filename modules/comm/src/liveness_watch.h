#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ebb::comm {

/// What a rank publishes with every sign of life.
struct Beat {
  enum class State { kAlive, kLeft, kFailed };
  std::uint64_t count = 0; ///< Only that it changes means anything.
  State state = State::kAlive;
  std::uint64_t sequence = 0; ///< Of the operation begun last; 0 before the first.
  std::int64_t step = -1;
  std::string op;
  std::string unit;
  std::string why; ///< Why it left or failed; empty for a plain goodbye.

  std::string text() const;
  /// Never throws: what is not a beat parses as one that says nothing.
  static Beat parse(std::string_view text);
  /// "all_gather of unit 'layers.3' at step 12"
  std::string activity() const;
};

/// What one rank knows of the others, on its own clock alone. Not thread-safe.
class PeerWatch {
 public:
  using Duration = std::chrono::nanoseconds;
  /// Peers read with every beat. More than one, so that a peer is still watched when its watcher dies with it; few, so
  /// that the store's work grows with the world and not with its square.
  static constexpr int kWatched = 8;

  /// @param heartbeat   Between signs of life.
  /// @param dead_after  Silence after which a peer is lost.
  PeerWatch(int rank, int size, Duration heartbeat, Duration dead_after);

  /// The peers to read next: the kWatched nearest above this rank (cyclic) that have not left.
  std::vector<int> watched() const;
  /// A beat of `peer` was read.
  void saw(int peer, Beat beat);
  /// Ends a round of reading that began `elapsed` after the one before.
  ///
  /// Silence is counted in rounds in which the store answered, each for two heartbeats at most: a rank that was stopped
  /// itself, or whose store did not answer, has no ground to call the others silent.
  void end_round(Duration elapsed);

  /// The first watched peer that is silent for too long, and for how long.
  struct Silent {
    int rank;
    double seconds;
  };
  std::optional<Silent> silent() const;

  struct Peer {
    std::optional<Beat> beat; ///< The newest; none before the first.
    Duration silence{}; ///< Since the counter last moved.
    bool read_this_round = false;
    bool moved_this_round = false;
    bool watched_last_round = false;
  };
  const Peer& peer(int rank) const {
    return peers_[static_cast<std::size_t>(rank)];
  }
  /// The first peer that said goodbye and named no loss as its reason; -1: none.
  int first_plainly_left() const;
  /// Peers that have not begun operation `sequence`, as far as known.
  std::vector<int> behind(std::uint64_t sequence) const;

 private:
  int rank_;
  int size_;
  Duration heartbeat_;
  Duration dead_after_;
  std::vector<Peer> peers_;
};

} // namespace ebb::comm
