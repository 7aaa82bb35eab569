#include "streams/recorded_device.h"

#include "support/forwarding_communicator.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <optional>
#include <set>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

namespace ebb::shard::test {
namespace recorded {

// Below ebb's own key, so that parameters have their data when an operator is seen; nothing else uses it.
constexpr auto kSeeKey = c10::DispatchKey::AutocastPrivateUse1;
constexpr auto kFakeType = c10::DeviceType::PrivateUse1;

constexpr std::size_t kMostStreams = 16;
constexpr int kHost = 0;
constexpr int kCompute = 1;

/// How much of each stream's work comes before something.
struct VectorClock {
  std::array<std::uint32_t, kMostStreams> ticks{};
  void join(const VectorClock& other) {
    for (std::size_t i = 0; i < kMostStreams; ++i) {
      ticks[i] = std::max(ticks[i], other.ticks[i]);
    }
  }
};

struct RecordedEvent {
  VectorClock clock;
  int source = kCompute;
};

/// Bytes that an operator uses.
struct Range {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  std::uintptr_t storage_begin = 0;
  std::uintptr_t storage_end = 0;
  bool write = false;
};

struct Access {
  std::uintptr_t begin;
  std::uintptr_t end;
  int stream;
  std::uint32_t tick;
  bool write;
  std::string op;
};

struct Owned {
  std::uintptr_t end;
  int home; ///< The stream it belongs to; the host's is not the device's memory.
  std::vector<Access> accesses;
};

inline std::optional<Range> range_of(const at::Tensor& tensor, bool write) {
  if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->has_storage() || tensor.numel() == 0) {
    return std::nullopt;
  }
  auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  const auto begin = reinterpret_cast<std::uintptr_t>(storage->_mutable_data_ptr_no_checks().get());
  if (begin == 0) {
    return std::nullopt;
  }
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    last += (tensor.size(i) - 1) * tensor.stride(i);
  }
  const auto item = static_cast<std::int64_t>(tensor.itemsize());
  return Range{
      begin + tensor.storage_offset() * item, begin + (tensor.storage_offset() + last + 1) * item, begin,
      begin + storage->nbytes(), write};
}

} // namespace recorded

using namespace recorded;

std::string Hazard::text() const {
  return then + (kind == Kind::kReadBeforeWrite ? " may read before " : " may reuse before ") + first;
}

class RecordedDevice::Impl : public std::enable_shared_from_this<Impl> {
 public:
  static thread_local Impl* here;

  Impl() {
    names_ = {"host", "compute"};
    // Over what is excluded by default: all keys for autocast are.
    auto keys = c10::impl::tls_local_dispatch_key_set();
    keys.included_ = keys.included_ | c10::DispatchKeySet(kSeeKey);
    keys.excluded_ = keys.excluded_ - c10::DispatchKeySet(kSeeKey);
    force_.emplace(keys);
    here = this;
  }
  ~Impl() = default;
  void stop() {
    here = nullptr;
    force_.reset();
  }

  int new_stream(const std::string& name) {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(names_.size() < kMostStreams, "more streams than a vector clock has");
    names_.push_back(name);
    return static_cast<int>(names_.size()) - 1;
  }
  int take_from_pool() {
    static const std::array<std::string, 3> names{"gather", "reduce", "copy"};
    const auto i = taken_++;
    return new_stream(i < names.size() ? names[i] : "pool " + std::to_string(i));
  }

  int current() const {
    return current_;
  }
  int exchange(int stream) {
    return std::exchange(current_, stream);
  }

  // --- order
  void record(RecordedEvent& event, int stream) {
    const std::lock_guard lock(mutex_);
    event = {reach(stream), stream};
  }
  void wait(int waiter, const RecordedEvent& event) {
    const std::lock_guard lock(mutex_);
    ++waits_[{names_[waiter], names_[event.source]}];
    if (ignored_.contains({names_[waiter], names_[event.source]}) || num_waits_++ == ignored_wait_) {
      return;
    }
    clocks_[waiter].join(event.clock);
  }

  // --- memory
  void allocate(void* data, std::size_t size) {
    const std::lock_guard lock(mutex_);
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    for (auto old = blocks_.lower_bound(begin); old != blocks_.end() && old->first < begin + size;) {
      old = blocks_.erase(old); // the host's, of memory that was given back meanwhile
    }
    // What the stream did before may have been to the same memory.
    blocks_[begin] = {
        begin + size,
        current_,
        {{begin, begin + size, current_, reach(current_).ticks[current_], true, "the memory's last life"}}};
  }
  void free(void* data) {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(reinterpret_cast<std::uintptr_t>(data));
    if (found != blocks_.end()) {
      check(found->second, {found->first, found->second.end, 0, 0, true}, found->second.home, "the memory's next life");
      blocks_.erase(found);
    }
  }

  // --- work
  void work(const std::string& op, const std::vector<Range>& ranges, int stream) {
    const std::lock_guard lock(mutex_);
    if (!ranges.empty()) {
      ++num_operators_;
      use(op, ranges, stream);
    }
  }
  /// An operator on the current stream; on the host as far as the memory is the host's.
  void operate(const std::string& op, const std::vector<Range>& ranges, bool non_blocking, bool host_reads) {
    const std::lock_guard lock(mutex_);
    std::vector<Range> device;
    std::vector<Range> host;
    for (const auto& range : ranges) {
      const auto* block = find(range);
      (block && block->home != kHost ? device : host).push_back(range);
    }
    if (non_blocking) {
      device.insert(device.end(), host.begin(), host.end());
      host.clear();
    }
    if (!device.empty()) {
      ++num_operators_;
      use(op, device, current_);
      if (!host.empty() || host_reads) {
        ++waits_[{"host", names_[current_]}];
        clocks_[kHost].join(clocks_[current_]);
      }
    }
    if (!host.empty()) {
      use(op, host, kHost);
    }
  }
  bool on_device(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    const auto range = range_of(tensor, false);
    const auto* block = range ? find(*range) : nullptr;
    return block && block->home != kHost;
  }

  bool paused = false;
  std::set<std::pair<std::string, std::string>> ignored_;
  std::int64_t ignored_wait_ = -1;
  std::map<std::pair<std::string, std::string>, std::int64_t> waits_;
  std::int64_t num_waits_ = 0;
  std::int64_t num_operators_ = 0;
  std::vector<Hazard> hazards_;
  std::mutex mutex_; ///< Memory may be dropped by another thread.

 private:
  /// The clock of what `stream` is given next: after all that the host has seen.
  VectorClock& reach(int stream) {
    clocks_[stream].join(clocks_[kHost]);
    return clocks_[stream];
  }
  Owned* find(const Range& range) {
    auto after = blocks_.upper_bound(range.begin);
    if (after == blocks_.begin()) {
      return nullptr;
    }
    --after;
    return range.begin < after->second.end ? &after->second : nullptr;
  }
  void check(const Owned& block, const Range& range, int stream, const std::string& op) {
    const auto& clock = reach(stream);
    for (const auto& before : block.accesses) {
      if (before.begin >= range.end || range.begin >= before.end || !(before.write || range.write) ||
          clock.ticks[before.stream] >= before.tick) {
        continue;
      }
      const auto kind =
          before.write && !range.write ? Hazard::Kind::kReadBeforeWrite : Hazard::Kind::kReuseBeforeLastUse;
      Hazard hazard{kind, before.op + " on " + names_[before.stream], op + " on " + names_[stream]};
      if (seen_.emplace(hazard.kind, hazard.first, hazard.then).second) {
        hazards_.push_back(std::move(hazard));
      }
    }
  }
  void use(const std::string& op, const std::vector<Range>& ranges, int stream) {
    const auto tick = ++reach(stream).ticks[stream];
    for (const auto& range : ranges) {
      auto* block = find(range);
      if (!block) {
        block = &(blocks_[range.storage_begin] = {range.storage_end, kHost, {}});
      }
      check(*block, range, stream, op);
      std::erase_if(block->accesses, [&](const Access& old) {
        const bool inside = range.begin <= old.begin && old.end <= range.end;
        return inside && (range.write || (!old.write && old.stream == stream));
      });
      block->accesses.push_back({range.begin, range.end, stream, tick, range.write, op});
    }
  }

  std::vector<std::string> names_;
  std::array<VectorClock, kMostStreams> clocks_{};
  std::map<std::uintptr_t, Owned> blocks_;
  std::set<std::tuple<Hazard::Kind, std::string, std::string>> seen_;
  std::size_t taken_ = 0;
  int current_ = kCompute;
  std::optional<c10::impl::ForceDispatchKeyGuard> force_;
};

thread_local RecordedDevice::Impl* RecordedDevice::Impl::here = nullptr;

// What LibTorch calls.
struct RecordedDeviceHooks {
  using Impl = RecordedDevice::Impl;

  static c10::Stream stream(int id) {
    return c10::Stream(c10::Stream::UNSAFE, RecordedDevice::device(), id);
  }

  struct Guard final : c10::impl::DeviceGuardImplInterface {
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
      return stream(Impl::here ? Impl::here->current() : kCompute);
    }
    c10::Stream getDefaultStream(c10::Device) const override {
      return stream(kCompute);
    }
    c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
      TORCH_CHECK(Impl::here, "no RecordedDevice on this thread");
      return stream(Impl::here->take_from_pool());
    }
    c10::Stream exchangeStream(c10::Stream next) const override {
      return stream(Impl::here ? Impl::here->exchange(static_cast<int>(next.id())) : kCompute);
    }
    void record(void** event, const c10::Stream& from, c10::DeviceIndex, c10::EventFlag) const override {
      if (!*event) {
        *event = new RecordedEvent;
      }
      if (Impl::here) {
        Impl::here->record(*static_cast<RecordedEvent*>(*event), static_cast<int>(from.id()));
      }
    }
    void block(void* event, const c10::Stream& waiter) const override {
      if (Impl::here) {
        Impl::here->wait(static_cast<int>(waiter.id()), *static_cast<RecordedEvent*>(event));
      }
    }
    void synchronizeEvent(void* event) const override {
      if (Impl::here) {
        Impl::here->wait(kHost, *static_cast<RecordedEvent*>(event));
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

  class Allocator final : public c10::Allocator {
   public:
    explicit Allocator(c10::Allocator* inner) {
      inner_ = inner;
    }
    c10::DataPtr allocate(std::size_t size) override {
      auto data = inner_->allocate(size);
      void* at = data.get();
      if (!at) {
        return data;
      }
      Held held{std::move(data), {}};
      if (Impl::here) {
        Impl::here->allocate(at, size);
        held.recorder = Impl::here->weak_from_this();
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
      std::weak_ptr<Impl> recorder;
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

  static bool uses_no_data(const c10::FunctionSchema& schema) {
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
  static bool reads_shape_only(const std::string& name) {
    return name.ends_with("_like") || name.starts_with("aten::new_");
  }

  static void add(std::vector<Range>& ranges, const c10::IValue& value, bool write) {
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

  static void see(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kSeeKey);
    const auto& schema = op.schema();
    auto* recorder = Impl::here;
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

  static void install() {
    static std::once_flag once;
    std::call_once(once, [] {
      static const c10::impl::DeviceGuardImplRegistrar guard(kFakeType, new Guard);
      c10::SetAllocator(c10::kCPU, new Allocator(c10::GetAllocator(c10::kCPU)), /*priority=*/200);
      static auto* library = new torch::Library(torch::Library::IMPL, "_", kSeeKey, __FILE__, __LINE__);
      library->fallback(torch::CppFunction::makeFromBoxedFunction<&see>());
    });
  }

  struct Pause {
    Pause() : before(Impl::here && std::exchange(Impl::here->paused, true)) {}
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;
    ~Pause() {
      if (Impl::here) {
        Impl::here->paused = before;
      }
    }
    bool before;
  };

  class Work final : public comm::Work {
   public:
    using Kept = std::vector<std::vector<at::Tensor>>;
    Work(
        std::unique_ptr<comm::Work> work, RecordedEvent done, std::vector<at::Tensor> tensors,
        std::shared_ptr<Kept> abandoned)
        : work_(std::move(work)), done_(done), tensors_(std::move(tensors)), abandoned_(std::move(abandoned)) {}
    ~Work() override {
      if (!tensors_.empty()) {
        abandoned_->push_back(std::move(tensors_));
      }
    }
    bool poll() override {
      return false; // no stream may count on what the host has seen
    }
    void wait() override {
      if (Impl::here) {
        Impl::here->wait(Impl::here->current(), done_);
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

  class Communicator final : public ebb::test::ForwardingCommunicator {
   public:
    explicit Communicator(std::shared_ptr<comm::Communicator> group)
        : ForwardingCommunicator(std::move(group)), stream_(Impl::here->new_stream("nccl")) {}
    ~Communicator() override {
      if (Impl::here && !abandoned_->empty()) { // what was abandoned is dropped when the host knows that it is done
        RecordedEvent all;
        Impl::here->record(all, stream_);
        Impl::here->wait(kHost, all);
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
      return std::make_shared<Communicator>(ForwardingCommunicator::split(ranks, name));
    }

   private:
    template <class Start>
    std::unique_ptr<comm::Work> start(
        const char* name, std::vector<at::Tensor> inputs, const std::vector<at::Tensor>& outputs, const Start& run) {
      auto& recorder = *Impl::here;
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
      return std::make_unique<Work>(std::move(work), event, std::move(inputs), abandoned_);
    }
    int stream_;
    std::shared_ptr<Work::Kept> abandoned_ = std::make_shared<Work::Kept>();
  };
};

RecordedDevice::RecordedDevice() {
  RecordedDeviceHooks::install();
  TORCH_CHECK(!Impl::here, "one RecordedDevice per thread at a time");
  impl_ = std::make_shared<Impl>();
}

RecordedDevice::~RecordedDevice() {
  impl_->stop();
}

c10::Device RecordedDevice::device() {
  return {kFakeType, 0};
}

std::shared_ptr<comm::Communicator> RecordedDevice::over(std::shared_ptr<comm::Communicator> group) {
  return std::make_shared<RecordedDeviceHooks::Communicator>(std::move(group));
}

void RecordedDevice::ignore(const std::string& waiter, const std::string& source) {
  impl_->ignored_.emplace(waiter, source);
}

void RecordedDevice::ignore_wait(std::int64_t index) {
  impl_->ignored_wait_ = index;
}

std::vector<Hazard> RecordedDevice::hazards() const {
  const std::lock_guard lock(impl_->mutex_);
  return impl_->hazards_;
}

std::int64_t RecordedDevice::num_operators() const {
  return impl_->num_operators_;
}

std::int64_t RecordedDevice::num_waits() const {
  return impl_->num_waits_;
}

std::int64_t RecordedDevice::waits(const std::string& waiter, const std::string& source) const {
  const auto found = impl_->waits_.find({waiter, source});
  return found == impl_->waits_.end() ? 0 : found->second;
}

} // namespace ebb::shard::test
