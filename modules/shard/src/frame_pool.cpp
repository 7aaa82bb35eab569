#include "frame_pool.h"

#include "op_results.h"

#include <torch/torch.h>

#include <cstring>
#include <utility>

namespace ebb::shard {

at::Tensor allocate_for_comm(const CommAllocator& allocator, std::int64_t bytes, c10::Device device) {
  if (!allocator) {
    return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  }
  const auto memory = allocator(bytes, device);
  TORCH_CHECK_VALUE(
      memory.defined() && memory.scalar_type() == at::kByte && memory.is_contiguous() && memory.device() == device &&
          memory.numel() >= bytes,
      "[fully_shard] expected comm_allocator to return ", bytes, " contiguous uint8 on ", device, ", got ",
      memory.defined() ? c10::str(memory.sizes(), " of ", memory.dtype(), " on ", memory.device()) : "nothing");
  return memory.view({-1}).narrow(0, 0, bytes);
}

FramePool::FramePool(int capacity, std::int64_t frame_bytes, c10::Device device, CommAllocator allocator)
    : capacity_(capacity), frame_bytes_(frame_bytes), device_(device), allocator_(std::move(allocator)) {}

std::optional<Frame> FramePool::take_if_free() {
  if (!free_.empty()) {
    Frame frame = std::move(free_.back());
    free_.pop_back();
    return frame;
  }
  if (made_ < capacity_) {
    ++made_;
    return Frame{allocate_for_comm(allocator_, frame_bytes_, device_)};
  }
  return std::nullopt;
}

Frame FramePool::take_extra(std::int64_t bytes) {
  return Frame{allocate_for_comm(allocator_, bytes, device_), /*extra=*/true};
}

Frame FramePool::take_kept(std::int64_t bytes) {
  for (auto parked = parked_.begin(); parked != parked_.end(); ++parked) {
    if (parked->memory.numel() == bytes) {
      Frame frame = std::move(*parked);
      parked_.erase(parked);
      return frame;
    }
  }
  return Frame{allocate_for_comm(allocator_, bytes, device_), /*extra=*/true, /*kept=*/true};
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
