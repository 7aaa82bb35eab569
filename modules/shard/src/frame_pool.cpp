#include "frame_pool.h"

#include "op_results.h"

#include <torch/torch.h>

#include <cstring>
#include <utility>

namespace ebb::shard {
namespace {

at::Tensor allocate(std::int64_t bytes, c10::Device device) {
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

} // namespace

FramePool::FramePool(int capacity, std::int64_t frame_bytes, c10::Device device)
    : capacity_(capacity), frame_bytes_(frame_bytes), device_(device) {}

std::optional<Frame> FramePool::take_if_free() {
  if (!free_.empty()) {
    Frame frame = std::move(free_.back());
    free_.pop_back();
    return frame;
  }
  if (made_ < capacity_) {
    ++made_;
    return Frame{allocate(frame_bytes_, device_)};
  }
  return std::nullopt;
}

Frame FramePool::take_extra(std::int64_t bytes) {
  return Frame{allocate(bytes, device_), /*extra=*/true};
}

Frame FramePool::take_kept(std::int64_t bytes) {
  for (auto parked = parked_.begin(); parked != parked_.end(); ++parked) {
    if (parked->memory.numel() == bytes) {
      Frame frame = std::move(*parked);
      parked_.erase(parked);
      return frame;
    }
  }
  return Frame{allocate(bytes, device_), /*extra=*/true, /*kept=*/true};
}

void FramePool::refit(int capacity, std::int64_t frame_bytes) {
  capacity_ = capacity;
  if (frame_bytes != frame_bytes_) {
    frame_bytes_ = frame_bytes;
    made_ -= static_cast<int>(free_.size());
    free_.clear();
    parked_.clear();
  }
}

void FramePool::lose(Frame& frame) {
  made_ -= !frame.extra;
  frame.lost = true;
}

void FramePool::give_back(Frame frame) {
  if (frame.lost) {
    return;
  }
#ifdef EBB_CHECK_INVARIANTS
  // A read of a frame that was given back then shows as NaN.
  if (frame.memory.is_cpu() && frame.memory.numel() > 0) {
    if (!is_without_memory(frame.memory)) {
      std::memset(frame.memory.data_ptr(), 0xff, frame.memory.numel());
    }
  }
#endif
  if (!frame.extra && frame.memory.numel() != frame_bytes_) {
    --made_;
  } else if (!frame.extra) {
    free_.push_back(std::move(frame));
  } else if (frame.kept) {
    parked_.push_back(std::move(frame));
  }
}

} // namespace ebb::shard
