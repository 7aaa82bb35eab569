#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ebb::comm {

/// Which ranks of a group share a host, and which of them carries what between hosts. The same at every rank.
///
/// What crosses hosts is spread over rails: rail j runs through one rank of each host, the carrier of j there, so that a
/// host's ranks work on its traffic together. There are as many rails as the widest host has ranks; a narrower host's
/// ranks carry several.
class HostLayout {
 public:
  /// @param host_names  Of each rank. Hosts are numbered by their first ranks.
  explicit HostLayout(const std::vector<std::string>& host_names);

  int size() const {
    return static_cast<int>(host_of_.size());
  }
  int num_hosts() const {
    return static_cast<int>(ranks_.size());
  }
  int host_of(int rank) const {
    return host_of_[rank];
  }
  /// Ascending.
  const std::vector<int>& ranks_of(int host) const {
    return ranks_[host];
  }
  /// Among the ranks of its host.
  int local_index(int rank) const {
    return local_index_[rank];
  }
  bool share_host(int a, int b) const {
    return host_of_[a] == host_of_[b];
  }
  int num_rails() const {
    return num_rails_;
  }
  int carrier(int host, int rail) const {
    const auto& ranks = ranks_[host];
    return ranks[static_cast<std::size_t>(rail) % ranks.size()];
  }
  /// Whether each host's ranks are neighbours, so that a sum in rank order visits each host once.
  bool in_rank_order() const {
    return in_rank_order_;
  }
  /// Pairs (a, b), in this order, of ranks on different hosts.
  std::int64_t num_pairs_across() const;

 private:
  std::vector<int> host_of_;
  std::vector<int> local_index_;
  std::vector<std::vector<int>> ranks_;
  int num_rails_ = 0;
  bool in_rank_order_ = true;
};

/// A range of elements that moves as one message.
struct Piece {
  std::int64_t begin = 0;
  std::int64_t count = 0;
};

/// Takes `count` elements apart, so that hosts can work at the same time: while one adds a piece, the next one receives
/// it. At least `streams` x 8 pieces, but none below 64 KB and none above 1 MB.
std::vector<Piece> pieces_of(std::int64_t count, std::int64_t element_bytes, int streams);

} // namespace ebb::comm
