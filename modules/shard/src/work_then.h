#pragma once

#include "ebb/comm/work.h"

#include <c10/core/GradMode.h>

#include <functional>
#include <memory>
#include <utility>

namespace ebb::shard {

/// A collective whose output is made by what comes after it: runs `then` once, without autograd, at the end of wait().
class WorkThen final : public comm::Work {
 public:
  WorkThen(std::unique_ptr<comm::Work> work, std::function<void()> then)
      : work_(std::move(work)), then_(std::move(then)) {}
  bool poll() override {
    if (!work_->poll()) {
      return false;
    }
    wait();
    return true;
  }
  void wait() override {
    work_->wait();
    if (const auto then = std::exchange(then_, nullptr)) { // and what it holds goes
      const c10::NoGradGuard no_grad;
      then();
    }
  }
  void release() override {
    wait();
    work_->release();
  }

 private:
  std::unique_ptr<comm::Work> work_;
  std::function<void()> then_;
};

} // namespace ebb::shard
