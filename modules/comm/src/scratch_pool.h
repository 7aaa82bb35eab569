#pragma once

#include <c10/core/CPUAllocator.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace ebb::comm {

/// Receive buffers, used again and again: the sizes of a training step recur.
class ScratchPool {
 public:
  struct Buffer {
    c10::DataPtr memory;
    std::size_t bytes = 0;
    char* data() const {
      return static_cast<char*>(memory.get());
    }
  };

  Buffer take(std::size_t bytes) {
    {
      const std::lock_guard lock(mutex_);
      auto best = free_.end();
      for (auto it = free_.begin(); it != free_.end(); ++it) {
        if (it->bytes >= bytes && (best == free_.end() || it->bytes < best->bytes)) {
          best = it;
        }
      }
      if (best != free_.end()) {
        Buffer found = std::move(*best);
        free_.erase(best);
        return found;
      }
      free_.clear(); // All are too small: growing anew is cheaper than keeping every size there ever was.
    }
    return {c10::GetCPUAllocator()->allocate(bytes), bytes};
  }

  void give(Buffer buffer) {
    if (buffer.bytes > 0) {
      const std::lock_guard lock(mutex_);
      free_.push_back(std::move(buffer));
    }
  }

 private:
  std::mutex mutex_;
  std::vector<Buffer> free_;
};

} // namespace ebb::comm
