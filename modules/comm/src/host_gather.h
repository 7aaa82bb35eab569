#pragma once

#include "host_messages.h"

#include <vector>

namespace ebb::comm {

/// All-gather: each shard crosses to each other host once, on the rail of its rank, and is shared there.
class HostGather final : public HostOperation {
 public:
  HostGather(
      std::unique_ptr<HostMessages> messages, char* output, const char* input, std::int64_t count,
      std::int64_t element_bytes);
  void post() override;
  void finish() override;

 private:
  struct Part {
    int source;
    Piece piece;
  };

  /// What `rank` receives from other hosts, in this order.
  std::vector<Part> parts_to(int rank);
  char* place_of(const Part& part) const;

  char* const output_;
  const char* const input_;
  const std::int64_t bytes_; ///< Of a shard.
  const std::int64_t width_;
  const std::vector<Piece> pieces_;
  std::vector<Part> parts_;
  std::vector<HostMessages::Incoming> across_; ///< By part.
  std::vector<HostMessages::Incoming> shards_; ///< Of the mates.
  std::vector<std::vector<HostMessages::Incoming>> within_; ///< By mate: the parts that it receives.
};

/// Broadcast: from the root's host along a chain of hosts, each piece on the next rail, shared at each host.
class HostBroadcast final : public HostOperation {
 public:
  HostBroadcast(
      std::unique_ptr<HostMessages> messages, char* data, std::int64_t count, std::int64_t element_bytes, int root);
  void post() override;
  void finish() override;

 private:
  /// Who hands this piece to this rank; -1 for the root. Sets `stream`.
  int source_of(std::size_t piece, Stream& stream);
  /// Offers the piece to the next host and to this one, or only counts it.
  void pass_on(std::size_t piece, bool only_count);

  char* const data_;
  const std::int64_t width_;
  const int root_;
  std::vector<Piece> pieces_;
  std::vector<HostMessages::Incoming> incoming_; ///< By piece.
};

} // namespace ebb::comm
