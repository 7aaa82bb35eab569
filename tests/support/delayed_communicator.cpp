#include "support/delayed_communicator.h"

#include "support/forwarding_communicator.h"

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

class DelayedCommunicator final : public ForwardingCommunicator {
 public:
  DelayedCommunicator(std::shared_ptr<comm::Communicator> group, int most_us)
      : ForwardingCommunicator(std::move(group)), most_us_(most_us), delay_(std::make_shared<Delay>(rank(), most_us)) {}

  std::unique_ptr<comm::Work> all_gather(
      const at::Tensor& output, const at::Tensor& input, std::string_view unit) override {
    delay_->pause();
    return later(group().all_gather(output, input, unit));
  }
  std::unique_ptr<comm::Work> reduce_scatter(
      const at::Tensor& output, const at::Tensor& input, double divisor, std::string_view unit) override {
    delay_->pause();
    return later(group().reduce_scatter(output, input, divisor, unit));
  }
  std::unique_ptr<comm::Work> all_reduce(
      const at::Tensor& tensor, comm::ReduceOp op, double divisor, std::string_view unit) override {
    delay_->pause();
    return later(group().all_reduce(tensor, op, divisor, unit));
  }
  std::unique_ptr<comm::Work> broadcast(const at::Tensor& tensor, int root, std::string_view unit) override {
    delay_->pause();
    return later(group().broadcast(tensor, root, unit));
  }
  void barrier() override {
    delay_->pause();
    group().barrier();
  }
  std::vector<std::string> exchange(const std::string& mine) override {
    delay_->pause();
    return group().exchange(mine);
  }

 protected:
  std::shared_ptr<comm::Communicator> split(const std::vector<int>& ranks, const std::string& name) override {
    return delayed(ForwardingCommunicator::split(ranks, name), most_us_);
  }

 private:
  std::unique_ptr<comm::Work> later(std::unique_ptr<comm::Work> work) {
    return std::make_unique<DelayedWork>(std::move(work), delay_);
  }

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
