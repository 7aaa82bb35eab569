#include "streams/recorded_device.h"

#include "support/forwarding_communicator.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace ebb::shard::test {
namespace recorded {

// Below ebb's own key, so that parameters have their data when an operator is seen; nothing else uses it.
constexpr auto kSeeKey = c10::DispatchKey::AutocastPrivateUse1;
constexpr auto kFakeType = c10::DeviceType::PrivateUse1;

// What LibTorch calls.
inline c10::Stream stream(int id) {
  return c10::Stream(c10::Stream::UNSAFE, RecordedDevice::device(), id);
}

struct StreamGuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kFakeType;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return RecordedDevice::device();
  }
  c10::Device getDevice() const override {
    return RecordedDevice::device();
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override {
    return stream(StreamBooks::here() ? StreamBooks::here()->current() : kCompute);
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return stream(kCompute);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    TORCH_CHECK(StreamBooks::here(), "no RecordedDevice on this thread");
    return stream(StreamBooks::here()->take_from_pool());
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(StreamBooks::here() ? StreamBooks::here()->exchange(static_cast<int>(next.id())) : kCompute);
  }
  void record(void** event, const c10::Stream& from, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) {
      *event = new RecordedEvent;
    }
    if (StreamBooks::here()) {
      StreamBooks::here()->record(*static_cast<RecordedEvent*>(*event), static_cast<int>(from.id()));
    }
  }
  void block(void* event, const c10::Stream& waiter) const override {
    if (StreamBooks::here()) {
      StreamBooks::here()->wait(static_cast<int>(waiter.id()), *static_cast<RecordedEvent*>(event));
    }
  }
  void synchronizeEvent(void* event) const override {
    if (StreamBooks::here()) {
      StreamBooks::here()->wait(kHost, *static_cast<RecordedEvent*>(event));
    }
  }
  bool queryEvent(void*) const override {
    return false;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<RecordedEvent*>(event);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 0; // so that autograd starts no threads for it
  }
};

class StreamAllocator final : public c10::Allocator {
 public:
  explicit StreamAllocator(c10::Allocator* inner) {
    inner_ = inner;
  }
  c10::DataPtr allocate(std::size_t size) override {
    auto data = inner_->allocate(size);
    void* at = data.get();
    if (!at) {
      return data;
    }
    Held held{std::move(data), {}};
    if (StreamBooks::here()) {
      StreamBooks::here()->allocate(at, size);
      held.recorder = StreamBooks::here()->weak_from_this();
    }
    const std::lock_guard lock(mutex());
    all().insert_or_assign(at, std::move(held));
    return {at, at, &drop, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &drop; // operators of oneDNN take memory without its DataPtr
  }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    inner_->copy_data(to, from, size);
  }

 private:
  struct Held {
    c10::DataPtr data;
    std::weak_ptr<StreamBooks> recorder;
  };
  static std::mutex& mutex() {
    static auto* made = new std::mutex;
    return *made;
  }
  static std::unordered_map<void*, Held>& all() {
    static auto* made = new std::unordered_map<void*, Held>;
    return *made;
  }
  static void drop(void* at) {
    Held held;
    {
      const std::lock_guard lock(mutex());
      auto node = all().extract(at);
      if (node.empty()) { // oneDNN's is made by the allocator that was there at first, and dropped by this one
        inner_->raw_deallocate(at);
        return;
      }
      held = std::move(node.mapped());
    }
    if (const auto recorder = held.recorder.lock()) {
      recorder->free(at);
    }
  }
  static inline c10::Allocator* inner_ = nullptr;
};

inline bool uses_no_data(const c10::FunctionSchema& schema) {
  static const std::unordered_set<std::string> metadata_only{
      "aten::_has_compatible_shallow_copy_type",
      "aten::set_",
      "aten::is_same_size",
      "aten::result_type",
      "aten::can_cast",
      "aten::_version",
      "aten::requires_grad_",
      "aten::is_leaf",
      "aten::retain_grad",
      "aten::detach_",
      "aten::data",
      "aten::resize_"};
  if (metadata_only.contains(schema.name())) {
    return true;
  }
  bool aliases = false;
  for (const auto& argument : schema.arguments()) {
    if (argument.alias_info()) {
      if (argument.alias_info()->isWrite()) {
        return false;
      }
      aliases = true;
    }
  }
  return aliases; // views; what they copy inside is seen for itself
}
inline bool reads_shape_only(const std::string& name) {
  return name.ends_with("_like") || name.starts_with("aten::new_");
}

inline void add(std::vector<Range>& ranges, const c10::IValue& value, bool write) {
  if (value.isTensor()) {
    if (const auto range = range_of(value.toTensor(), write)) {
      ranges.push_back(*range);
    }
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      add(ranges, tensor, write);
    }
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      add(ranges, element, write);
    }
  }
}

inline void see(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kSeeKey);
  const auto& schema = op.schema();
  auto* recorder = StreamBooks::here();
  if (!recorder || recorder->paused || uses_no_data(schema)) {
    op.redispatchBoxed(below, stack);
    return;
  }
  std::vector<Range> reads;
  std::vector<Range> writes;
  bool non_blocking = false;
  const auto first = stack->size() - schema.arguments().size();
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    const auto& value = (*stack)[first + i];
    const bool write = argument.alias_info() && argument.alias_info()->isWrite();
    if (!write && !reads_shape_only(schema.name())) {
      add(reads, value, false);
    } else if (write) {
      add(writes, value, true);
    }
    non_blocking = non_blocking || (argument.name() == "non_blocking" && value.isBool() && value.toBool());
  }
  op.redispatchBoxed(below, stack);
  for (std::size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    std::vector<Range> results;
    add(results, (*stack)[i], true);
    for (const auto& result : results) { // operators like dropout return their input where they have nothing to do
      const auto same = [&](const Range& read) { return read.storage_begin == result.storage_begin; };
      if (std::none_of(reads.begin(), reads.end(), same)) {
        writes.push_back(result);
      }
    }
  }
  reads.insert(reads.end(), writes.begin(), writes.end());
  const auto name = schema.name().substr(schema.name().find("::") + 2);
  recorder->operate(name, reads, non_blocking, name == "_local_scalar_dense" || name == "item" || name == "equal");
}

inline void install() {
  static std::once_flag once;
  std::call_once(once, [] {
    static const c10::impl::DeviceGuardImplRegistrar guard(kFakeType, new StreamGuardImpl);
    c10::SetAllocator(c10::kCPU, new StreamAllocator(c10::GetAllocator(c10::kCPU)), /*priority=*/200);
    static auto* library = new torch::Library(torch::Library::IMPL, "_", kSeeKey, __FILE__, __LINE__);
    library->fallback(torch::CppFunction::makeFromBoxedFunction<&see>());
  });
}

struct Pause {
  Pause() : before(StreamBooks::here() && std::exchange(StreamBooks::here()->paused, true)) {}
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;
  ~Pause() {
    if (StreamBooks::here()) {
      StreamBooks::here()->paused = before;
    }
  }
  bool before;
};

class StreamWork final : public comm::Work {
 public:
  using Kept = std::vector<std::vector<at::Tensor>>;
  StreamWork(
      std::unique_ptr<comm::Work> work, RecordedEvent done, std::vector<at::Tensor> tensors,
      std::shared_ptr<Kept> abandoned)
      : work_(std::move(work)), done_(done), tensors_(std::move(tensors)), abandoned_(std::move(abandoned)) {}
  ~StreamWork() override {
    if (!tensors_.empty()) {
      abandoned_->push_back(std::move(tensors_));
    }
  }
  bool poll() override {
    return false; // no stream may count on what the host has seen
  }
  void wait() override {
    if (StreamBooks::here()) {
      StreamBooks::here()->wait(StreamBooks::here()->current(), done_);
    }
    tensors_.clear();
  }
  void release() override {
    {
      const Pause pause;
      work_->release();
    }
    wait();
  }

 private:
  std::unique_ptr<comm::Work> work_;
  RecordedEvent done_;
  std::vector<at::Tensor> tensors_; ///< As c10d does: until wait(), or until it is done.
  std::shared_ptr<Kept> abandoned_;
};

class StreamCommunicator final : public ebb::test::ForwardingCommunicator {
 public:
  explicit StreamCommunicator(std::shared_ptr<comm::Communicator> group)
      : ForwardingCommunicator(std::move(group)), stream_(StreamBooks::here()->new_stream("nccl")) {}
  ~StreamCommunicator() override {
    if (StreamBooks::here() &&
        !abandoned_->empty()) { // what was abandoned is dropped when the host knows that it is done
      RecordedEvent all;
      StreamBooks::here()->record(all, stream_);
      StreamBooks::here()->wait(kHost, all);
    }
  }

  std::unique_ptr<comm::Work> all_gather(
      const at::Tensor& output, const at::Tensor& input, std::string_view unit) override {
    return start("all_gather", {input}, {output}, [&] { return group().all_gather(output, input, unit); });
  }
  std::unique_ptr<comm::Work> reduce_scatter(
      const at::Tensor& output, const at::Tensor& input, double divisor, std::string_view unit) override {
    return start(
        "reduce_scatter", {input}, {output}, [&] { return group().reduce_scatter(output, input, divisor, unit); });
  }
  std::unique_ptr<comm::Work> all_reduce(
      const at::Tensor& tensor, comm::ReduceOp op, double divisor, std::string_view unit) override {
    return start("all_reduce", {}, {tensor}, [&] { return group().all_reduce(tensor, op, divisor, unit); });
  }
  std::unique_ptr<comm::Work> broadcast(const at::Tensor& tensor, int root, std::string_view unit) override {
    return start("broadcast", {}, {tensor}, [&] { return group().broadcast(tensor, root, unit); });
  }

 protected:
  std::shared_ptr<comm::Communicator> split(const std::vector<int>& ranks, const std::string& name) override {
    return std::make_shared<StreamCommunicator>(ForwardingCommunicator::split(ranks, name));
  }

 private:
  template <class Start>
  std::unique_ptr<comm::Work> start(
      const char* name, std::vector<at::Tensor> inputs, const std::vector<at::Tensor>& outputs, const Start& run) {
    auto& recorder = *StreamBooks::here();
    std::unique_ptr<comm::Work> work;
    {
      const Pause pause;
      work = run();
      work->wait();
    }
    if (!recorder.on_device(outputs.front())) {
      return work; // by the control plane, on the host
    }
    RecordedEvent event;
    recorder.record(event, recorder.current());
    recorder.wait(stream_, event);
    std::vector<Range> ranges;
    for (const auto& tensor : inputs) {
      add(ranges, tensor, false);
    }
    for (const auto& tensor : outputs) {
      add(ranges, tensor, true);
    }
    recorder.work(name, ranges, stream_);
    recorder.record(event, stream_);
    inputs.insert(inputs.end(), outputs.begin(), outputs.end());
    return std::make_unique<StreamWork>(std::move(work), event, std::move(inputs), abandoned_);
  }
  int stream_;
  std::shared_ptr<StreamWork::Kept> abandoned_ = std::make_shared<StreamWork::Kept>();
};

} // namespace recorded

RecordedDevice::RecordedDevice() : books_(std::make_shared<StreamBooks>()) {
  recorded::install();
  TORCH_CHECK(!StreamBooks::here(), "one RecordedDevice per thread at a time");
  StreamBooks::here() = books_.get();
  // Over what is excluded by default: all keys for autocast are.
  auto keys = c10::impl::tls_local_dispatch_key_set();
  keys.included_ = keys.included_ | c10::DispatchKeySet(recorded::kSeeKey);
  keys.excluded_ = keys.excluded_ - c10::DispatchKeySet(recorded::kSeeKey);
  sees_.emplace(keys);
}

RecordedDevice::~RecordedDevice() {
  StreamBooks::here() = nullptr;
}

c10::Device RecordedDevice::device() {
  return {recorded::kFakeType, 0};
}

std::shared_ptr<comm::Communicator> RecordedDevice::over(std::shared_ptr<comm::Communicator> group) {
  return std::make_shared<recorded::StreamCommunicator>(std::move(group));
}

void RecordedDevice::ignore(const std::string& waiter, const std::string& source) {
  books_->ignored.emplace(waiter, source);
}

void RecordedDevice::ignore_wait(std::int64_t index) {
  books_->ignored_wait = index;
}

std::vector<Hazard> RecordedDevice::hazards() const {
  return books_->hazards();
}

std::int64_t RecordedDevice::num_operators() const {
  return books_->num_operators;
}

std::int64_t RecordedDevice::num_waits() const {
  return books_->num_waits;
}

std::int64_t RecordedDevice::waits(const std::string& waiter, const std::string& source) const {
  const auto found = books_->waits.find({waiter, source});
  return found == books_->waits.end() ? 0 : found->second;
}

} // namespace ebb::shard::test
