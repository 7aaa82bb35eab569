#include "host_layout.h"

#include <algorithm>

namespace ebb::comm {
namespace {

constexpr std::int64_t kSmallestPiece = 64 << 10; // Below, messages cost more than their bytes.
constexpr std::int64_t kLargestPiece = 1 << 20;
constexpr std::int64_t kPiecesPerStream = 8; // What a chain of hosts wastes while it fills is one piece a host.
constexpr std::int64_t kAlignment = 64; // Of pieces, in elements.

} // namespace

HostLayout::HostLayout(const std::vector<std::string>& host_names) {
  std::vector<std::string> names; // By host.
  for (int rank = 0; rank < static_cast<int>(host_names.size()); ++rank) {
    const auto found = std::find(names.begin(), names.end(), host_names[rank]);
    const auto host = static_cast<int>(found - names.begin());
    if (found == names.end()) {
      names.push_back(host_names[rank]);
      ranks_.emplace_back();
    } else if (host_of_.back() != host) {
      in_rank_order_ = false;
    }
    host_of_.push_back(host);
    local_index_.push_back(static_cast<int>(ranks_[host].size()));
    ranks_[host].push_back(rank);
    num_rails_ = std::max(num_rails_, static_cast<int>(ranks_[host].size()));
  }
}

std::int64_t HostLayout::num_pairs_across() const {
  std::int64_t pairs = 0;
  for (const auto& ranks : ranks_) {
    const auto here = static_cast<std::int64_t>(ranks.size());
    pairs += here * (size() - here);
  }
  return pairs;
}

std::vector<Piece> pieces_of(std::int64_t count, std::int64_t element_bytes, int streams) {
  const auto wanted = std::clamp(count * element_bytes / (kPiecesPerStream * streams), kSmallestPiece, kLargestPiece);
  const auto each = wanted / element_bytes / kAlignment * kAlignment;
  std::vector<Piece> pieces;
  for (std::int64_t begin = 0; begin < count; begin += each) {
    pieces.push_back({begin, std::min(each, count - begin)});
  }
  return pieces;
}

} // namespace ebb::comm
