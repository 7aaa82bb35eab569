#include "ebb/shard/step_profiler.h"
#include "dry_mode.h"
#include "op_flops.h"
#include "op_kind.h"
#include "op_results.h"

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

namespace ebb::shard {
namespace {

// Note [Dry run]
// A key below autograd, included per thread, sends every operator here after sharding and autograd have done their part,
// so that both are what they are in a real run. Results are given shapes and no memory. The key travels with backward.
// LibTorch keeps it for its own fake tensors, which it makes from Python alone.
constexpr c10::DispatchKey kStepKey = c10::DispatchKey::Fake;

class LiveBytes final : public c10::MemoryReportingInfoBase {
 public:
  void add(std::int64_t bytes) {
    const auto now = now_ += bytes;
    auto peak = peak_.load();
    while (now > peak && !peak_.compare_exchange_weak(peak, now)) {}
  }
  void reportMemoryUsage(
      void* /*ptr*/, std::int64_t bytes, std::size_t /*total*/, std::size_t /*reserved*/, c10::Device) override {
    if (!paused) {
      add(bytes);
    }
  }
  bool memoryProfilingEnabled() const override {
    return true;
  }
  void begin() {
    peak_ = now_.load();
  }
  std::int64_t now() const {
    return now_;
  }
  std::int64_t peak() const {
    return peak_;
  }
  std::atomic<bool> paused{false};

 private:
  std::atomic<std::int64_t> now_{0};
  std::atomic<std::int64_t> peak_{0};
};

/// A tensor's storage without memory, counted while it lives.
struct Counted {
  std::shared_ptr<LiveBytes> live;
  std::int64_t bytes;
  static void drop(void* counted) {
    const std::unique_ptr<Counted> self(static_cast<Counted*>(counted));
    self->live->add(-self->bytes);
  }
};

// What happens to the operators of one thread.
class StepMode {
 public:
  explicit StepMode(bool dry) : dry_(dry), memory_(c10::DebugInfoKind::PROFILER_STATE, live_), key_(kStepKey) {
    here = this;
  }
  ~StepMode() {
    here = nullptr;
  }

  static void on_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kStepKey);
    if (here) {
      here->call(op, below, stack);
    } else {
      op.redispatchBoxed(below, stack);
    }
  }
  static thread_local StepMode* here;

  bool dry() const {
    return dry_;
  }
  void begin() {
    profile_ = {};
    live_->begin();
  }
  StepProfile profile() const {
    auto profile = profile_;
    profile.live_bytes = live_->now();
    profile.peak_live_bytes = live_->peak();
    return profile;
  }

 private:
  using Inputs = std::vector<c10::IValue>;

  void call(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack) {
    const auto inputs = inputs_of(op, *stack);
    c10::DeviceType device = c10::kCPU;
    for (const auto& input : inputs) {
      for_each_tensor(input, [&](const at::Tensor& tensor) { device = tensor.device().type(); });
    }
    profile_.flops += flops_of(op, *stack);
    const auto kind = device == c10::kMeta ? OpKind::kThrough : kind_of(op, device);
    if (kind == OpKind::kThrough) {
      op.redispatchBoxed(below, stack);
      return;
    }
    const c10::impl::ExcludeDispatchKeyGuard no_mode(kStepKey); // what runs inside an operator is part of it
    if (kind != OpKind::kEmpty) {
      ++profile_.operators[op.schema().name()];
    }
    if (!dry_) {
      op.redispatchBoxed(below, stack);
      return;
    }
    switch (kind) {
      case OpKind::kEmpty:
        make_empty(op, inputs, stack);
        return;
      case OpKind::kMakes:
        make(op, inputs, stack);
        return;
      case OpKind::kWrites:
        write(op, inputs, stack);
        return;
      default:
        read(op, inputs, stack);
    }
  }

  static bool any_without_memory(const Inputs& inputs) {
    bool any = false;
    for (const auto& input : inputs) {
      for_each_tensor(input, [&](const at::Tensor& tensor) { any = any || is_without_memory(tensor); });
    }
    return any;
  }

  // Integers are indices, which the rest may depend on; bytes are buffers for anything.
  static bool stays_real(const at::Tensor& like) {
    return like.numel() <= kSmallNumel ||
           (c10::isIntegralType(like.scalar_type(), /*includeBool=*/true) && like.scalar_type() != at::kByte);
  }

  void make_empty(const c10::OperatorHandle& op, const Inputs& inputs, torch::jit::Stack* stack) {
    const auto& asked = inputs[*index_of(op, "device")];
    const auto device = asked.isNone() ? at::Device(at::kCPU) : asked.toDevice();
    const auto like = results_like(op, inputs);
    if (device.is_meta() || !like || stays_real(like->back().toTensor())) {
      op.callBoxed(stack);
      return;
    }
    torch::jit::drop(*stack, inputs.size());
    stack->emplace_back(without_memory(like->back().toTensor()));
  }

  void make(const c10::OperatorHandle& op, const Inputs& inputs, torch::jit::Stack* stack) {
    if (!any_without_memory(inputs)) {
      op.callBoxed(stack);
      return;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        !op.hasTag(at::Tag::dynamic_output_shape), "[StepProfiler] the step used ", op.schema().name(),
        ", the shape of whose result depends on values that a dry run does not have; run this model in earnest");
    auto results = results_like(op, inputs);
    if (!results) {
      live_->paused = true;
      try {
        results = results_on_zeros(op, inputs);
      } catch (...) {
        live_->paused = false;
        throw;
      }
      live_->paused = false;
    }
    torch::jit::drop(*stack, inputs.size());
    for (const auto& result : *results) {
      stack->push_back(with_tensors(result, [&](const at::Tensor& like) { return without_memory(like); }));
    }
  }

  void write(const c10::OperatorHandle& op, const Inputs& inputs, torch::jit::Stack* stack) {
    if (!any_without_memory(inputs)) {
      op.callBoxed(stack);
      return;
    }
    const auto written = written_of(op, inputs);
    if (is_out(op)) {
      const auto results = results_like(op, inputs);
      for (std::size_t i = 0; results && i < written.size() && i < results->size(); ++i) {
        const auto& like = (*results)[i].toTensor();
        if (written[i].sizes() != like.sizes()) {
          written[i].unsafeGetTensorImpl()->set_storage_keep_dtype(without_memory(like).storage());
          written[i].unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
        }
      }
    }
    torch::jit::drop(*stack, inputs.size());
    for (std::size_t i = 0; i < op.schema().returns().size(); ++i) {
      stack->emplace_back(written.at(i));
    }
  }

  static void read(const c10::OperatorHandle& op, const Inputs& inputs, torch::jit::Stack* stack) {
    if (op.schema().name() == "aten::_local_scalar_dense" && any_without_memory(inputs)) {
      const bool floating = inputs[0].toTensor().is_floating_point();
      torch::jit::drop(*stack, 1);
      stack->emplace_back(floating ? c10::Scalar(0.0) : c10::Scalar(0));
      return;
    }
    op.callBoxed(stack);
  }

  at::Tensor without_memory(const at::Tensor& like) {
    const auto bytes = static_cast<std::int64_t>(
        at::detail::computeStorageNbytes(like.sizes(), like.strides(), like.dtype().itemsize()));
    live_->add(bytes);
    return empty_without_memory(
        like, c10::DataPtr(nullptr, new Counted{live_, bytes}, &Counted::drop, c10::kCPU),
        "[StepProfiler] memory of a tensor was read or written by pointer in a dry run, where tensors have none; run "
        "this model in earnest");
  }

  bool dry_;
  StepProfile profile_;
  std::shared_ptr<LiveBytes> live_ = std::make_shared<LiveBytes>();
  c10::DebugInfoGuard memory_;
  c10::impl::IncludeDispatchKeyGuard key_;
};

thread_local StepMode* StepMode::here = nullptr;

void install_step_mode() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Never destroyed: at process exit the dispatcher may already be gone.
    static auto* library = new torch::Library(torch::Library::IMPL, "_", kStepKey, __FILE__, __LINE__);
    library->fallback(torch::CppFunction::makeFromBoxedFunction<&StepMode::on_operator>());
  });
}

} // namespace

bool is_dry() {
  return StepMode::here && StepMode::here->dry();
}

struct StepProfiler::State {
  explicit State(Mode mode) : step(mode == Mode::kDry) {}
  StepMode step;
};

StepProfiler::StepProfiler(Mode mode) {
  TORCH_CHECK_VALUE(!StepMode::here, "[StepProfiler] this thread has a profiler already; end it before making another");
  install_step_mode();
  state_ = std::make_unique<State>(mode);
}

StepProfiler::~StepProfiler() = default;

void StepProfiler::begin() {
  state_->step.begin();
}

StepProfile StepProfiler::profile() const {
  return state_->step.profile();
}

} // namespace ebb::shard
