#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <cstdint>
#include <memory>
#include <optional>

namespace ebb::shard {

// Note [Streams]
// On an accelerator the host only gives orders, and work of different streams runs at the same time. Gathers and
// reductions each have a stream of their own, a lane, copies of offloaded shards a third one; all else runs on the
// compute stream: the one that is current where the model is used. Whatever goes from one stream to another is ordered by
// events, and only by them:
//
//   what                                  who waits               for what
//   a frame is filled again               the gather lane         Frame::used: the last operator that read it
//   a written shard is gathered           the gather lane         compute, at the first gather after the write
//   a slice kept near is gathered         the gather lane         Unit::near_ready
//   parameters are read                   compute                 Unit::ready
//   a shard is written                    compute                 Unit::ready of the gather that read it
//   gradients are reduced                 the reduction lane      compute, when the last gradient is in the buffer
//   a reduce buffer is filled again       compute                 ReduceBuffer::free
//   gradients are seen, backward is over  compute                 the reduction lane
//   a shard is copied to the device       the copies, then the    each the other's end of the last use and of the copy
//                                         gather lane
//   gradients are copied to host memory   the copies, the host    the reduction; the copy
//
// A collective runs on the communicator's own stream, which waits for the current one when it starts and for which the
// current one waits in Work::wait(): so both are called with the lane current.
//
// Memory is given back to the allocator without record_stream(), so that the same memory serves every step: the allocator
// hands a block out again to the stream it came from at once. So what is made inside a lane is dropped inside it, after
// it has waited for the others that used it; and compute has waited for a lane when memory of its own that the lane used
// is dropped.
//
// On the CPU there are no streams: everything below is one comparison.

/// Which stream of the engine's own.
enum class Lane : std::uint8_t { kGather, kReduce };

/// A point in the work of a stream. Nothing waits for one that was never recorded.
class Mark {
 public:
  bool recorded() const {
    return event_.has_value();
  }

 private:
  friend class Streams;
  std::optional<c10::Event> event_;
};

/// The lanes of one device and their order, by LibTorch's device-generic streams and events. Without a device, all calls
/// do nothing. Guarded by its engine's lock.
class Streams {
 public:
  /// None.
  Streams() = default;
  /// Of an accelerator.
  explicit Streams(c10::Device device) : device_(std::make_unique<Device>(device)) {}
  /// Of `device` where it is an accelerator; none for the CPU and for meta.
  static Streams of(c10::Device device);

  bool any() const {
    return device_ != nullptr;
  }
  c10::Stream lane(Lane lane) const {
    return lane == Lane::kGather ? device_->gather : device_->reduce;
  }

  /// Runs `body` with the lane as the current stream.
  template <class Body>
  auto run(Lane in, const Body& body) const {
    if (!device_) {
      return body();
    }
    const c10::StreamGuard guard(lane(in));
    return body();
  }

  /// `mark`: the end of what the current stream has been given so far.
  void record(Mark& mark) const {
    if (device_) {
      device_->record(mark.event_);
    }
  }
  /// What the current stream is given from here on comes after `mark`.
  void wait(const Mark& mark) const {
    if (mark.event_) {
      device_->wait(*mark.event_);
    }
  }
  /// What the lane is given from here on comes after all that the current stream has been given.
  void follow(Lane lane) const {
    if (device_) {
      device_->order(device_->current(), this->lane(lane));
    }
  }
  /// What the current stream is given from here on comes after all that the lane has been given.
  void join(Lane lane) const {
    if (device_) {
      device_->order(this->lane(lane), device_->current());
    }
  }
  /// join() of both, where something has failed already.
  void join_quietly() const noexcept;

 private:
  struct Device {
    explicit Device(c10::Device of);
    c10::Stream current() const;
    void record(std::optional<c10::Event>& event) const;
    void wait(const c10::Event& event) const;
    void order(c10::Stream first, c10::Stream then);

    c10::impl::VirtualGuardImpl impl;
    c10::Device device;
    c10::Stream gather;
    c10::Stream reduce;
    c10::Event scratch; ///< For order() alone: what waits for an event waits for its last recording before.
  };
  std::unique_ptr<Device> device_;
};

} // namespace ebb::shard
