#include "frame_pool.h"

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
    return Frame{allocate(frame_bytes_, device_), /*extra=*/false};
  }
  return std::nullopt;
}

Frame FramePool::take_extra(std::int64_t bytes) {
  return Frame{allocate(bytes, device_), /*extra=*/true};
}

void FramePool::give_back(Frame frame) {
#ifdef EBB_CHECK_INVARIANTS
  // A read of a frame that was given back then shows as NaN.
  if (frame.memory.is_cpu() && frame.memory.numel() > 0) {
    std::memset(frame.memory.data_ptr(), 0xff, frame.memory.numel());
  }
#endif
  if (!frame.extra) {
    free_.push_back(std::move(frame));
  }
}

void FramePool::release_memory() {
  made_ -= static_cast<int>(free_.size());
  free_.clear();
}

} // namespace ebb::shard
