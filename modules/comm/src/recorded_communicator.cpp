#include "recorded_communicator.h"

#include "operation.h"

#include <c10/util/Exception.h>

#include <exception>
#include <utility>

namespace ebb::comm {
namespace {

using State = CollectiveRecord::State;

/// Where the collectives of one group are noted.
struct Flight {
  std::shared_ptr<FlightReport> report;
  std::shared_ptr<FlightRing> ring;

  std::uint64_t begin(Op op, std::string_view unit, std::int64_t bytes, at::ScalarType dtype) const {
    return ring->begin(op, unit, bytes, dtype, report->step());
  }
  void fail(std::uint64_t number, const std::exception& error) const {
    ring->end(number, State::kFailed);
    report->failed(*ring, number, error);
  }
};

class RecordedWork final : public Work {
 public:
  RecordedWork(std::unique_ptr<Work> work, Flight flight, std::uint64_t number)
      : work_(std::move(work)), flight_(std::move(flight)), number_(number) {}
  RecordedWork(const RecordedWork&) = delete;
  RecordedWork& operator=(const RecordedWork&) = delete;
  ~RecordedWork() override {
    if (open_) {
      flight_.ring->end(number_, State::kDropped);
    }
  }

  bool poll() override {
    return follow([this] { return work_->poll(); });
  }
  void wait() override {
    follow([this] { return work_->wait(), true; });
  }
  void release() override {
    follow([this] { return work_->release(), true; });
  }

 private:
  template <class Call>
  bool follow(const Call& call) {
    try {
      const bool ended = call();
      if (ended && open_) {
        open_ = false;
        flight_.ring->end(number_, State::kDone);
      }
      return ended;
    } catch (const std::exception& error) {
      open_ = false;
      flight_.fail(number_, error);
      throw;
    }
  }

  std::unique_ptr<Work> work_;
  Flight flight_;
  std::uint64_t number_;
  bool open_ = true; ///< Its end is not noted yet.
};

/// Communicator::split() is for Mesh; this lends it to the one communicator that holds another.
class Splitter : public Communicator {
 public:
  static std::shared_ptr<Communicator> split_off(
      Communicator& group, const std::vector<int>& ranks, const std::string& name) {
    return (group.*&Splitter::split)(ranks, name);
  }
};

class RecordedCommunicator final : public Communicator {
 public:
  RecordedCommunicator(std::shared_ptr<Communicator> group, Flight flight)
      : Communicator(group->rank(), group->size()), group_(std::move(group)), flight_(std::move(flight)) {}
  RecordedCommunicator(const RecordedCommunicator&) = delete;
  RecordedCommunicator& operator=(const RecordedCommunicator&) = delete;
  ~RecordedCommunicator() override {
    if (std::uncaught_exceptions() > 0) {
      flight_.report->leaving("an exception ended it; see this rank's own messages");
    }
  }

  const Capabilities& capabilities() const override {
    return group_->capabilities();
  }

  std::unique_ptr<Work> all_gather(const at::Tensor& output, const at::Tensor& input, std::string_view unit) override {
    return start(Op::kAllGather, unit, input, [&] { return group_->all_gather(output, input, unit); });
  }

  std::unique_ptr<Work> reduce_scatter(
      const at::Tensor& output, const at::Tensor& input, double divisor, std::string_view unit) override {
    return start(Op::kReduceScatter, unit, input, [&] { return group_->reduce_scatter(output, input, divisor, unit); });
  }

  std::unique_ptr<Work> all_reduce(
      const at::Tensor& tensor, ReduceOp op, double divisor, std::string_view unit) override {
    return start(Op::kAllReduce, unit, tensor, [&] { return group_->all_reduce(tensor, op, divisor, unit); });
  }

  std::unique_ptr<Work> broadcast(const at::Tensor& tensor, int root, std::string_view unit) override {
    return start(Op::kBroadcast, unit, tensor, [&] { return group_->broadcast(tensor, root, unit); });
  }

  void barrier() override {
    run(Op::kBarrier, 0, [&] { group_->barrier(); });
  }

  std::vector<std::string> exchange(const std::string& mine) override {
    check_exchange(mine); // Refused before it counts.
    std::vector<std::string> texts;
    run(Op::kExchange, static_cast<std::int64_t>(mine.size()), [&] { texts = group_->exchange(mine); });
    return texts;
  }

  void abort() noexcept override {
    group_->abort();
    flight_.report->leaving("it left the group by abort()");
  }

  void set_step(std::int64_t step) override {
    flight_.report->set_step(step);
    group_->set_step(step);
  }

  const Traffic& traffic() const override {
    return group_->traffic();
  }

  std::vector<CollectiveRecord> records() const {
    return flight_.ring->records();
  }

 protected:
  std::shared_ptr<Communicator> split(const std::vector<int>& ranks, const std::string& name) override {
    auto part = Splitter::split_off(*group_, ranks, name);
    const auto& own = flight_.ring->group();
    const auto size = part->size();
    Flight flight{flight_.report, flight_.report->add_group(own == "world" ? name : own + "/" + name, size)};
    return std::make_shared<RecordedCommunicator>(std::move(part), std::move(flight));
  }

 private:
  template <class Call>
  std::unique_ptr<Work> start(Op op, std::string_view unit, const at::Tensor& given, const Call& call) {
    const auto bytes = given.defined() ? static_cast<std::int64_t>(given.nbytes()) : 0;
    const auto number = flight_.begin(op, unit, bytes, given.defined() ? given.scalar_type() : at::kByte);
    try {
      return std::make_unique<RecordedWork>(call(), flight_, number);
    } catch (const c10::ValueError&) {
      flight_.ring->withdraw(number); // Of these calls it says that the arguments are wrong: nothing was sent.
      throw;
    } catch (const std::exception& error) {
      flight_.fail(number, error);
      throw;
    }
  }

  template <class Call>
  void run(Op op, std::int64_t bytes, const Call& call) {
    const auto number = flight_.begin(op, "", bytes, at::kByte);
    try {
      call();
    } catch (const std::exception& error) {
      flight_.fail(number, error);
      throw;
    }
    flight_.ring->end(number, State::kDone);
  }

  const std::shared_ptr<Communicator> group_;
  const Flight flight_;
};

} // namespace

std::shared_ptr<Communicator> record(
    std::shared_ptr<Communicator> group, const FlightSettings& settings, const Clock& clock) {
  if (settings.capacity == 0) {
    return group;
  }
  auto report = std::make_shared<FlightReport>(group->rank(), group->size(), settings, clock);
  auto ring = report->add_group("world", group->size());
  return std::make_shared<RecordedCommunicator>(std::move(group), Flight{std::move(report), std::move(ring)});
}

std::vector<CollectiveRecord> flight_record(const Communicator& group) {
  const auto* recorded = dynamic_cast<const RecordedCommunicator*>(&group);
  return recorded ? recorded->records() : std::vector<CollectiveRecord>();
}

} // namespace ebb::comm
