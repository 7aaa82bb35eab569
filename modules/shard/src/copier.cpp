#include "offload.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <array>
#include <condition_variable>
#include <deque>
#include <exception>
#include <future>
#include <mutex>
#include <thread>
#include <utility>

namespace ebb::shard {
namespace {

class ThreadCopy final : public Copy {
 public:
  explicit ThreadCopy(std::shared_future<void> done) : done_(std::move(done)) {}
  void wait() override {
    done_.get();
  }

 private:
  std::shared_future<void> done_;
};

class ThreadCopier final : public Copier {
 public:
  explicit ThreadCopier(std::function<void()> before_copy)
      : before_copy_(std::move(before_copy)), thread_([this] { run(); }) {}
  ~ThreadCopier() override {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }
  std::shared_ptr<Copy> copy(at::Tensor to, at::Tensor from, Direction /*direction*/) override {
    Task task{std::move(to), std::move(from), {}};
    auto copy = std::make_shared<ThreadCopy>(task.done.get_future().share());
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
    return copy;
  }

 private:
  struct Task {
    at::Tensor to;
    at::Tensor from;
    std::promise<void> done;
  };

  void run() {
    const at::NoGradGuard no_grad;
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return closing_ || !tasks_.empty(); });
      if (tasks_.empty()) {
        return;
      }
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      try {
        if (before_copy_) {
          before_copy_();
        }
        task.to.copy_(task.from);
        // Before anybody who waits goes on: the memory may be counted, or given back, at once.
        task.to = task.from = at::Tensor();
        task.done.set_value();
      } catch (...) {
        task.done.set_exception(std::current_exception());
      }
    }
  }

  std::function<void()> before_copy_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool closing_ = false;
  std::thread thread_; ///< Last: starts when all else is there.
};

class StreamCopy final : public Copy {
 public:
  StreamCopy(c10::Event done, c10::Device device, std::array<at::Tensor, 2> keep, Direction direction)
      : done_(std::move(done)), device_(device), keep_(std::move(keep)), direction_(direction) {}
  ~StreamCopy() override {
    wait_quietly();
  }
  void wait() override {
    if (direction_ == Direction::kToDevice) {
      done_.block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
    } else {
      done_.synchronize();
    }
  }

 private:
  // Page-locked memory must not be reused under a copy that still reads or writes it.
  void wait_quietly() noexcept {
    try {
      done_.synchronize();
    } catch (...) {}
  }
  c10::Event done_;
  c10::Device device_;
  std::array<at::Tensor, 2> keep_;
  Direction direction_;
};

class StreamCopier final : public Copier {
 public:
  explicit StreamCopier(c10::Device device)
      : impl_(device.type()),
        device_(device),
        stream_(impl_.getStreamFromGlobalPool(device, /*isHighPriority=*/false)),
        ready_(device.type()) {}
  std::shared_ptr<Copy> copy(at::Tensor to, at::Tensor from, Direction direction) override {
    const at::NoGradGuard no_grad;
    ready_.record(impl_.getStream(device_));
    ready_.block(stream_);
    c10::Event done(device_.type());
    {
      const c10::StreamGuard guard(stream_);
      to.copy_(from, /*non_blocking=*/true);
      done.record(stream_);
    }
    if (direction == Direction::kToDevice) {
      to = at::Tensor(); // or every shard of a step would stay on the device until its copy is dropped
    }
    return std::make_shared<StreamCopy>(
        std::move(done), device_, std::array{std::move(to), std::move(from)}, direction);
  }

 private:
  c10::impl::VirtualGuardImpl impl_;
  c10::Device device_;
  c10::Stream stream_;
  c10::Event ready_;
};

} // namespace

std::unique_ptr<Copier> Copier::make(c10::Device device, const OffloadPolicy& policy) {
  if (device.is_cpu()) {
    return std::make_unique<ThreadCopier>(policy.before_copy);
  }
  return std::make_unique<StreamCopier>(device);
}

} // namespace ebb::shard
