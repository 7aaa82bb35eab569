#include "wait_meter.h"

#include <utility>

namespace ebb::shard {
namespace {

class MeasuredWork final : public comm::Work {
 public:
  MeasuredWork(std::unique_ptr<comm::Work> work, std::shared_ptr<WaitMeter::Totals> totals, const Clock& clock)
      : work_(std::move(work)), totals_(std::move(totals)), clock_(clock), started_(clock.now()) {}

  bool poll() override {
    return work_->poll();
  }
  void wait() override {
    const auto before = clock_.now();
    work_->wait();
    const auto after = clock_.now();
    totals_->waited += seconds_between(before, after);
    if (!std::exchange(waited_, true)) {
      totals_->under_way += seconds_between(started_, after);
    }
  }
  void release() override {
    const auto before = clock_.now();
    work_->release();
    totals_->waited += seconds_between(before, clock_.now());
  }

 private:
  std::unique_ptr<comm::Work> work_;
  std::shared_ptr<WaitMeter::Totals> totals_;
  const Clock& clock_;
  Clock::TimePoint started_;
  bool waited_ = false;
};

} // namespace

std::unique_ptr<comm::Work> WaitMeter::measure(std::unique_ptr<comm::Work> work) {
  return work ? std::make_unique<MeasuredWork>(std::move(work), totals_, *clock_) : nullptr;
}

} // namespace ebb::shard
