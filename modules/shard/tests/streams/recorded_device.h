#pragma once

#include "ebb/comm/communicator.h"
#include "streams/stream_books.h"

#include <c10/core/Device.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace ebb::shard::test {

// Note [Recorded device]
// An accelerator that only keeps books. LibTorch knows it as a device with streams and events (PrivateUse1), so that the
// code under test is the one that runs on a GPU. Tensors stay on the CPU and operators run at once, in the host's order;
// what is checked is whether streams would have kept to it. A fallback sees every operator below ebb's own with the bytes
// that it reads and writes, on the stream that is current. Memory comes from an allocator that thinks like the caching
// ones: a block belongs to the stream it was made on, and is that stream's again, at once, when it is dropped. Memory from
// elsewhere, such as a mapped file, is the host's: operators on it run on the host, which waits for the stream where they
// use the device's memory as well, unless they are non-blocking copies. Each stream has a vector clock; events carry
// clocks from one stream to another. None of this looks at what the engine claims to use.

/// From its construction to its end, what this thread does is work of streams: one "compute" stream, current at first,
/// those that are taken from the pool, named "gather", "reduce", "copy", "pool 3", ... in the order of being taken, and
/// those of communicators. One per thread at a time. What is compared must be made inside it.
class RecordedDevice {
 public:
  RecordedDevice();
  ~RecordedDevice();
  RecordedDevice(const RecordedDevice&) = delete;
  RecordedDevice& operator=(const RecordedDevice&) = delete;

  /// For Engine::use_streams().
  static c10::Device device();

  /// `group` with collectives as c10d's are: on a stream of its own, after what the current stream has been given; wait()
  /// lets the current stream wait. Groups that Mesh splits off it as well.
  std::shared_ptr<comm::Communicator> over(std::shared_ptr<comm::Communicator> group);

  /// Waits of the stream `waiter` for work of `source` do nothing. The host is called "host".
  void ignore(const std::string& waiter, const std::string& source);
  /// Only the `index`-th wait for an event since construction does nothing.
  void ignore_wait(std::int64_t index);

  /// Each pair of operators once.
  std::vector<Hazard> hazards() const;
  std::int64_t num_operators() const; ///< With memory of the device.
  std::int64_t num_waits() const; ///< Of streams, and of the host, for events.
  /// How often `waiter` has waited for work of `source`.
  std::int64_t waits(const std::string& waiter, const std::string& source) const;

 private:
  std::shared_ptr<StreamBooks> books_;
  std::optional<c10::impl::ForceDispatchKeyGuard> sees_;
};

} // namespace ebb::shard::test
