#include "host_gather.h"

#include <algorithm>
#include <cstring>

namespace ebb::comm {

HostGather::HostGather(
    std::unique_ptr<HostMessages> messages, char* output, const char* input, std::int64_t count,
    std::int64_t element_bytes)
    : HostOperation(std::move(messages)),
      output_(output),
      input_(input),
      bytes_(count * element_bytes),
      width_(element_bytes),
      pieces_(pieces_of(count, element_bytes, 1)) {}

// The same piece of all sources before the next piece, so that all of them send at the same time.
std::vector<HostGather::Part> HostGather::parts_to(int rank) {
  const auto& layout = messages().layout();
  const int host = layout.host_of(rank);
  std::vector<Part> parts;
  for (const auto& piece : pieces_) {
    for (int source = 0; source < layout.size(); ++source) {
      if (layout.host_of(source) != host && layout.carrier(host, layout.local_index(source)) == rank) {
        parts.push_back({source, piece});
      }
    }
  }
  return parts;
}

char* HostGather::place_of(const Part& part) const {
  return output_ + part.source * bytes_ + part.piece.begin * width_;
}

void HostGather::post() {
  auto& net = messages();
  const auto& layout = net.layout();
  const int rank = net.rank();
  if (char* own = output_ + rank * bytes_; own != input_) {
    std::memcpy(own, input_, static_cast<std::size_t>(bytes_));
  }
  parts_ = parts_to(rank);
  for (const auto& part : parts_) {
    across_.push_back(net.receive(place_of(part), part.piece.count * width_, part.source, kAcross));
  }
  for (const auto& piece : pieces_) {
    for (int i = 1; i < layout.num_hosts(); ++i) { // Each host begins with another one.
      const int to = layout.carrier((net.host() + i) % layout.num_hosts(), layout.local_index(rank));
      net.send(input_ + piece.begin * width_, piece.count * width_, to, kAcross);
      net.count(piece.count * width_, to);
    }
  }
  for (const int mate : net.mates()) {
    net.send(input_, bytes_, mate, kWithin);
    net.count(bytes_, mate);
    for (const auto& part : parts_) {
      net.count(part.piece.count * width_, mate);
    }
    shards_.push_back(net.receive(output_ + mate * bytes_, bytes_, mate, kWithin));
    auto& theirs = within_.emplace_back();
    for (const auto& part : parts_to(mate)) {
      theirs.push_back(net.receive(place_of(part), part.piece.count * width_, mate, kWithin));
    }
  }
}

void HostGather::finish() {
  auto& net = messages();
  std::size_t rounds = parts_.size();
  for (const auto& theirs : within_) {
    rounds = std::max(rounds, theirs.size());
  }
  for (const auto& shard : shards_) {
    net.wait(shard);
  }
  for (std::size_t round = 0; round < rounds; ++round) {
    if (round < parts_.size()) {
      const auto& part = parts_[round];
      net.wait(across_[round]);
      for (const int mate : net.mates()) {
        net.send(place_of(part), part.piece.count * width_, mate, kWithin);
      }
    }
    for (const auto& theirs : within_) {
      if (round < theirs.size()) {
        net.wait(theirs[round]);
      }
    }
  }
  net.close();
}

HostBroadcast::HostBroadcast(
    std::unique_ptr<HostMessages> messages, char* data, std::int64_t count, std::int64_t element_bytes, int root)
    : HostOperation(std::move(messages)),
      data_(data),
      width_(element_bytes),
      root_(root),
      pieces_(pieces_of(count, element_bytes, this->messages().layout().num_rails())) {}

int HostBroadcast::source_of(std::size_t piece, Stream& stream) {
  const auto& layout = messages().layout();
  const int rank = messages().rank();
  const int host = messages().host();
  const int first = layout.host_of(root_);
  const auto rail = static_cast<int>(piece % static_cast<std::size_t>(layout.num_rails()));
  if (rank == root_) {
    return -1;
  }
  stream = kWithin;
  if (host == first) {
    return root_;
  }
  if (const int carrier = layout.carrier(host, rail); carrier != rank) {
    return carrier;
  }
  stream = kAcross;
  const int before = (host - 1 + layout.num_hosts()) % layout.num_hosts();
  return before == first ? root_ : layout.carrier(before, rail);
}

void HostBroadcast::pass_on(std::size_t piece, bool only_count) {
  auto& net = messages();
  const auto& layout = net.layout();
  const auto rail = static_cast<int>(piece % static_cast<std::size_t>(layout.num_rails()));
  const auto bytes = pieces_[piece].count * width_;
  const auto give = [&](int to, Stream stream) {
    if (only_count) {
      net.count(bytes, to);
    } else {
      net.send(data_ + pieces_[piece].begin * width_, bytes, to, stream);
    }
  };
  const int next = (net.host() + 1) % layout.num_hosts();
  if (next != layout.host_of(root_)) {
    give(layout.carrier(next, rail), kAcross);
  }
  for (const int mate : net.mates()) {
    give(mate, kWithin);
  }
}

void HostBroadcast::post() {
  auto& net = messages();
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    auto stream = kAcross;
    const int source = source_of(i, stream);
    if (source >= 0) {
      incoming_.push_back(net.receive(data_ + pieces_[i].begin * width_, pieces_[i].count * width_, source, stream));
    }
    if (source < 0 || stream == kAcross) {
      pass_on(i, true);
    }
    if (source < 0) {
      pass_on(i, false);
    }
  }
}

void HostBroadcast::finish() {
  auto& net = messages();
  for (std::size_t i = 0; i < incoming_.size(); ++i) {
    auto stream = kAcross;
    source_of(i, stream);
    net.wait(incoming_[i]);
    if (stream == kAcross) {
      pass_on(i, false);
    }
  }
  net.close();
}

} // namespace ebb::comm
