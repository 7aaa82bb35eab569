#include "fsdp/activations.h"

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <memory>
#include <mutex>

namespace ebb::bench {
namespace {

class LiveBytes : public c10::MemoryReportingInfoBase {
 public:
  explicit LiveBytes(const std::vector<at::Tensor>& parameters) : parameters_(parameters) {}

  void reportMemoryUsage(void*, std::int64_t change, std::size_t, std::size_t, c10::Device) override {
    std::lock_guard lock(mutex_);
    live_ += change;
    if (live_ <= peak_) {
      return; // Gradients would only take away from it.
    }
    std::int64_t gradients = 0;
    for (const auto& parameter : parameters_) {
      if (const auto& grad = parameter.grad(); grad.defined()) {
        gradients += static_cast<std::int64_t>(grad.nbytes());
      }
    }
    peak_ = std::max(peak_, live_ - gradients);
  }

  bool memoryProfilingEnabled() const override {
    return true;
  }

  std::int64_t peak() const {
    return peak_;
  }

 private:
  const std::vector<at::Tensor>& parameters_;
  std::mutex mutex_;
  std::int64_t live_ = 0;
  std::int64_t peak_ = 0;
};

} // namespace

std::int64_t peak_activation_bytes(
    const std::vector<at::Tensor>& parameters, const std::function<void()>& forward_backward) {
  auto live = std::make_shared<LiveBytes>(parameters);
  c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, live);
  forward_backward();
  return live->peak();
}

} // namespace ebb::bench
