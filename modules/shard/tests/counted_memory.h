#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

namespace ebb::shard::test {

/// Live bytes of tensors that this thread has allocated since, and the most of them.
class CountedMemory {
 public:
  CountedMemory() : counter_(std::make_shared<Counter>()), guard_(c10::DebugInfoKind::PROFILER_STATE, counter_) {}
  std::int64_t now() const {
    return counter_->now;
  }
  /// The most since the last call.
  std::int64_t peak() {
    return std::exchange(counter_->peak, counter_->now);
  }

 private:
  struct Counter : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void*, std::int64_t bytes, std::size_t, std::size_t, c10::Device) override {
      now += bytes;
      peak = std::max(peak, now);
    }
    bool memoryProfilingEnabled() const override {
      return true;
    }
    std::int64_t now = 0;
    std::int64_t peak = 0;
  };
  std::shared_ptr<Counter> counter_;
  c10::DebugInfoGuard guard_;
};

} // namespace ebb::shard::test
