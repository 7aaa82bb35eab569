#include "streams.h"

#include "ebb/base/error.h"
#include "ebb/base/log.h"

namespace ebb::shard {

Streams Streams::of(c10::Device device) {
  return device.is_cpu() || device.is_meta() ? Streams() : Streams(device);
}

void Streams::join_quietly() const noexcept {
  try {
    join(Lane::kGather);
    join(Lane::kReduce);
  } catch (const std::exception& error) {
    log::debug("the streams of a failed step cannot be waited for: {}", message_of(error));
  }
}

Streams::Device::Device(c10::Device of)
    : impl(of.type()),
      device(of),
      gather(impl.getStreamFromGlobalPool(of, /*isHighPriority=*/true)),
      reduce(impl.getStreamFromGlobalPool(of, /*isHighPriority=*/true)),
      scratch(of.type()) {}

c10::Stream Streams::Device::current() const {
  return impl.getStream(device);
}

void Streams::Device::record(std::optional<c10::Event>& event) const {
  if (!event) {
    event.emplace(device.type());
  }
  event->record(current());
}

void Streams::Device::wait(const c10::Event& event) const {
  event.block(current());
}

void Streams::Device::order(c10::Stream first, c10::Stream then) {
  if (first != then) {
    scratch.record(first);
    scratch.block(then);
  }
}

} // namespace ebb::shard
