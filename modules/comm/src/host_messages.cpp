#include "host_messages.h"

#include <c10/util/Exception.h>

#include <cerrno>
#include <cstring>

namespace ebb::comm {

HostMessages::HostMessages(
    int rank, std::shared_ptr<const HostRoutes> routes, std::shared_ptr<Health> health, SocketTransport& transport,
    SocketOperation& operation)
    : rank_(rank),
      routes_(std::move(routes)),
      health_(std::move(health)),
      transport_(transport),
      operation_(operation) {
  for (const int peer : layout().ranks_of(host())) {
    if (peer != rank_) {
      mates_.push_back(peer);
    }
  }
}

void HostMessages::open() {
  if (routes_->memory) {
    done_.resize(mates_.size());
    for (std::size_t i = 0; i < mates_.size(); ++i) {
      done_receives_.push_back(transport_.receive(&done_[i], 1, mates_[i], tag_of(operation_.info, kDone)));
    }
  }
}

void HostMessages::count(std::int64_t bytes, int peer) {
  sent_.total += bytes;
  sent_.across_hosts += layout().share_host(rank_, peer) ? 0 : bytes;
}

void HostMessages::send(const char* data, std::int64_t bytes, int peer, Stream stream) {
  const void* from = data;
  auto length = static_cast<std::size_t>(bytes);
  if (reads(peer)) {
    from = &addresses_.emplace_back(reinterpret_cast<std::uint64_t>(data));
    length = sizeof(std::uint64_t);
  }
  operation_.sends.push_back(transport_.send(from, length, peer, tag_of(operation_.info, stream)));
}

HostMessages::Incoming HostMessages::receive(char* to, std::int64_t bytes, int peer, Stream stream) {
  Incoming incoming{.handle = {}, .peer = peer, .to = to, .bytes = bytes};
  void* into = to;
  auto length = static_cast<std::size_t>(bytes);
  if (reads(peer)) {
    into = &addresses_.emplace_back();
    incoming.address = static_cast<const std::uint64_t*>(into);
    length = sizeof(std::uint64_t);
  }
  incoming.handle = transport_.receive(into, length, peer, tag_of(operation_.info, stream));
  return incoming;
}

void HostMessages::wait(const Incoming& incoming) {
  transport_.wait(incoming.handle);
  if (incoming.address != nullptr) {
    read(incoming);
  }
}

// Whoever leaves or fails says so in its control block before its memory goes away, hence the look at it after reading.
void HostMessages::read(const Incoming& incoming) {
  auto& memory = *routes_->memory;
  const int peer = incoming.peer;
  const bool good = memory.read(peer, *incoming.address, incoming.to, static_cast<std::size_t>(incoming.bytes));
  const int error = errno;
  const auto& block = memory.block(peer);
  const auto state = block.state.load(std::memory_order_acquire);
  if (good && state == RankState::kHere) {
    return;
  }
  if (state == RankState::kFailed) {
    // -1: a connection of the peer's broke, and who is to blame it does not know either.
    health_->break_group(block.cause < layout().size() ? block.cause : peer, block.why);
  } else {
    health_->break_group(
        peer,
        memory.alive(peer) ? c10::str("its memory cannot be read: ", std::strerror(error)) : "its process has ended");
  }
  TORCH_CHECK(false, "the memory of rank ", peer, " is gone"); // Health has the cause.
}

void HostMessages::close() {
  if (!routes_->memory) {
    return;
  }
  for (const int mate : mates_) {
    operation_.sends.push_back(transport_.send(&own_done_, 1, mate, tag_of(operation_.info, kDone)));
  }
  for (const auto& handle : done_receives_) {
    transport_.wait(handle);
  }
}

} // namespace ebb::comm
