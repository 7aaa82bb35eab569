#include "support/delayed_communicator.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <random>
#include <thread>
#include <utility>

namespace ebb::test {
namespace {

class Delay {
 public:
  Delay(int rank, int most_us) : random_(static_cast<unsigned>(rank + 1)), up_to_(0, most_us) {}
  void pause() {
    std::this_thread::sleep_for(std::chrono::microseconds(up_to_(random_)));
  }

 private:
  std::minstd_rand random_;
  std::uniform_int_distribution<int> up_to_;
};

class DelayedWork final : public comm::Work {
 public:
  DelayedWork(std::unique_ptr<comm::Work> work, std::shared_ptr<Delay> delay)
      : work_(std::move(work)), delay_(std::move(delay)) {}
  bool poll() override {
    return work_->poll();
  }
  void wait() override {
    delay_->pause();
    work_->wait();
    delay_->pause();
  }
  void release() override {
    work_->release();
  }

 private:
  std::unique_ptr<comm::Work> work_;
  std::shared_ptr<Delay> delay_;
};

/// Communicator::split() is for Mesh; this lends it to the communicator that holds another.
class Splitter : public comm::Communicator {
 public:
  static std::shared_ptr<comm::Communicator> split_off(
      comm::Communicator& group, const std::vector<int>& ranks, const std::string& name) {
    return (group.*&Splitter::split)(ranks, name);
  }
};

class DelayedCommunicator final : public comm::Communicator {
 public:
  DelayedCommunicator(std::shared_ptr<comm::Communicator> group, int most_us)
      : Communicator(group->rank(), group->size()),
        group_(std::move(group)),
        most_us_(most_us),
        delay_(std::make_shared<Delay>(rank(), most_us)) {}

  const comm::Capabilities& capabilities() const override {
    return group_->capabilities();
  }
  std::unique_ptr<comm::Work> all_gather(
      const at::Tensor& output, const at::Tensor& input, std::string_view unit) override {
    delay_->pause();
    return after(group_->all_gather(output, input, unit));
  }
  std::unique_ptr<comm::Work> reduce_scatter(
      const at::Tensor& output, const at::Tensor& input, double divisor, std::string_view unit) override {
    delay_->pause();
    return after(group_->reduce_scatter(output, input, divisor, unit));
  }
  std::unique_ptr<comm::Work> all_reduce(
      const at::Tensor& tensor, comm::ReduceOp op, double divisor, std::string_view unit) override {
    delay_->pause();
    return after(group_->all_reduce(tensor, op, divisor, unit));
  }
  std::unique_ptr<comm::Work> broadcast(const at::Tensor& tensor, int root, std::string_view unit) override {
    delay_->pause();
    return after(group_->broadcast(tensor, root, unit));
  }
  void barrier() override {
    delay_->pause();
    group_->barrier();
  }
  std::vector<std::string> exchange(const std::string& mine) override {
    delay_->pause();
    return group_->exchange(mine);
  }
  void abort() noexcept override {
    group_->abort();
  }
  void set_step(std::int64_t step) override {
    group_->set_step(step);
  }
  const comm::Traffic& traffic() const override {
    return group_->traffic();
  }

 protected:
  std::shared_ptr<comm::Communicator> split(const std::vector<int>& ranks, const std::string& name) override {
    return delayed(Splitter::split_off(*group_, ranks, name), most_us_);
  }

 private:
  std::unique_ptr<comm::Work> after(std::unique_ptr<comm::Work> work) {
    return std::make_unique<DelayedWork>(std::move(work), delay_);
  }

  std::shared_ptr<comm::Communicator> group_;
  int most_us_;
  std::shared_ptr<Delay> delay_;
};

} // namespace

std::shared_ptr<comm::Communicator> delayed(std::shared_ptr<comm::Communicator> group, int most_us) {
  return std::make_shared<DelayedCommunicator>(std::move(group), most_us);
}

int asked_delay_us() {
  const char* asked = std::getenv("EBB_TEST_DELAYS_US");
  return asked ? std::atoi(asked) : 0;
}

} // namespace ebb::test
