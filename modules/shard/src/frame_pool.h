#pragma once

#include "ebb/shard/fully_shard.h"
#include "streams.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace ebb::shard {

/// uint8, [bytes]. @throws ValueError where `allocator` returned something else.
at::Tensor allocate_for_comm(const CommAllocator& allocator, std::int64_t bytes, c10::Device device);

/// A buffer that can hold one unit's unsharded parameters.
struct Frame {
  at::Tensor memory; ///< uint8; its allocation is aligned for every dtype.
  bool extra = false; ///< Beyond the fixed number; freed when given back.
  bool kept = false; ///< Extra, but made anew in every step: parked when given back.
  bool lost = false; ///< Not to be reused.
  Mark used{}; ///< What has read the memory last; at first, what had it before.
};

/// A fixed number of equal frames, made when first needed and then reused, never freed in a step (FSDP paper, 3.4: the
/// rate limiter). Not thread-safe: the engine's lock guards it.
class FramePool {
 public:
  FramePool() = default;
  FramePool(int capacity, std::int64_t frame_bytes, c10::Device device, CommAllocator allocator);

  /// A frame of the fixed number, or nothing when all are out.
  std::optional<Frame> take_if_free();
  /// One more than the fixed number.
  Frame take_extra(std::int64_t bytes);
  /// As take_extra(), for units that are kept in every step: reuses one of the same size.
  Frame take_kept(std::int64_t bytes);
  void give_back(Frame frame);
  /// From here on so many frames of this size. Those that are out are dropped when they come back, if they do not fit.
  void refit(int capacity, std::int64_t frame_bytes);
  /// `frame` will not be reused: something may still write into it.
  void lose(Frame& frame);

  bool has_free() const {
    return !free_.empty() || made_ < capacity_;
  }
  int capacity() const {
    return capacity_;
  }
  std::int64_t frame_bytes() const {
    return frame_bytes_;
  }

 private:
  int capacity_ = 0;
  std::int64_t frame_bytes_ = 0;
  c10::Device device_ = c10::kCPU;
  CommAllocator allocator_;
  int made_ = 0;
  std::vector<Frame> free_;
  std::vector<Frame> parked_;
};

} // namespace ebb::shard
