#include "reducer.h"

#include "ebb/base/log.h"
#include "flat_parameter.h"
#include "module_tree.h"
#include "paged_storage.h"

#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <functional>
#include <unordered_set>

namespace ebb::shard {
namespace {

struct PostAccumulate final : torch::autograd::PostAccumulateGradHook {
  explicit PostAccumulate(std::function<void()> call) : call(std::move(call)) {}
  void operator()(const at::Tensor& /*parameter*/) override {
    call();
  }
  std::function<void()> call;
};

} // namespace

Reducer::Reducer(ReplicateOptions options, const ModuleTree& tree)
    : options_(std::move(options)), group_(options_.mesh.world()) {
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& node : tree.nodes) {
    for (const auto& [name, tensor] : node.parameters) {
      if (seen.insert(tensor.unsafeGetTensorImpl()).second) {
        parameters_.emplace_back(name, tensor);
      }
    }
  }
  std::int64_t bytes = 0;
  for (auto it = parameters_.rbegin(); it != parameters_.rend(); ++it) {
    const auto& [name, tensor] = *it;
    trained_.insert(trained_.begin(), tensor.requires_grad());
    if (!tensor.requires_grad()) {
      continue;
    }
    const auto limit = buckets_.size() <= 1 ? options_.first_bucket_bytes : options_.bucket_bytes;
    const bool fits = !buckets_.empty() && bytes + static_cast<std::int64_t>(tensor.nbytes()) <= limit &&
                      buckets_.back().slots.front().parameter.scalar_type() == tensor.scalar_type() &&
                      buckets_.back().slots.front().parameter.device() == tensor.device();
    if (!fits) {
      buckets_.emplace_back();
      buckets_.back().name = fmt::format("bucket {} from '{}'", buckets_.size() - 1, name);
      bytes = 0;
    }
    buckets_.back().slots.push_back({tensor, 0, {}, false});
    bytes += static_cast<std::int64_t>(tensor.nbytes());
    ++num_slots_;
  }
  for (auto& bucket : buckets_) {
    make_memory(bucket);
  }
}

void Reducer::make_memory(Bucket& bucket) {
  std::int64_t end = 0;
  for (auto& slot : bucket.slots) {
    slot.offset = end;
    end += (slot.parameter.numel() + kAlignment - 1) / kAlignment * kAlignment;
  }
  const auto& first = bucket.slots.front().parameter;
  bucket.memory = at::zeros({end}, first.options().requires_grad(false));
  for (auto& slot : bucket.slots) {
    const auto& like = slot.parameter;
    slot.grad = tensor_on(
        bucket.memory.storage(), /*paged=*/false, like.scalar_type(), slot.offset, like.sizes(), dense_strides(like));
  }
}

void Reducer::attach() {
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    for (std::size_t s = 0; s < buckets_[b].slots.size(); ++s) {
      auto& parameter = buckets_[b].slots[s].parameter;
      parameter.register_hook([weak = weak_from_this()](at::Tensor grad) {
        if (const auto reducer = weak.lock()) {
          reducer->before_gradient();
        }
        return grad;
      });
      torch::autograd::impl::set_post_acc_grad_hooks(
          parameter, std::make_unique<PostAccumulate>([weak = weak_from_this(), b, s] {
            const auto reducer = weak.lock();
            TORCH_CHECK_VALUE(
                reducer,
                "[replicate] the ReplicatedModel is gone, so that gradients would not be averaged; keep what "
                "replicate() returned as long as the model trains");
            reducer->on_gradient(b, s);
          }));
    }
  }
}

void Reducer::check_not_unfrozen() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    TORCH_CHECK_VALUE(
        trained_[i] || !parameters_[i].second.requires_grad(), "[replicate] '", parameters_[i].first,
        "' was frozen when the model was replicated and requires a gradient now, which nothing would average; set "
        "requires_grad before replicate()");
  }
}

void Reducer::before_gradient() {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_NOT_IMPLEMENTED(
      !at::GradMode::is_enabled(),
      "[replicate] backward(create_graph): gradients are averaged outside autograd and have no graph; leave it out, or "
      "take autograd::grad() of the inputs, whose graph may use the model's parameters");
  if (armed_ && backward_.expired()) {
    log::warn("the last backward ended by an exception; the gradients it left behind are dropped");
    reset();
  }
  if (!armed_) {
    check_not_unfrozen();
  }
}

void Reducer::on_gradient(std::size_t b, std::size_t s) {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  if (no_sync_scopes_ > 0) {
    return; // The gradient stays where autograd has accumulated it.
  }
  if (!armed_) {
    auto token = std::make_shared<int>();
    backward_ = token;
    torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), token = std::move(token)] {
      if (const auto reducer = weak.lock()) {
        reducer->finish();
      }
    });
    armed_ = true;
  }
  auto& bucket = buckets_[b];
  auto& slot = bucket.slots[s];
  auto& grad = slot.parameter.mutable_grad();
  if (!grad.defined()) {
    return;
  }
  TORCH_CHECK_VALUE(
      !(slot.used && bucket.work), "[replicate] a parameter of ", bucket.name,
      " received a second gradient in one backward after its bucket was sent (a checkpoint that calls backward "
      "itself?); use one backward per step");
  if (!grad.is_alias_of(slot.grad)) {
    slot.grad.copy_(grad);
    grad = slot.grad;
  }
  bucket.num_ready += !slot.used;
  slot.used = true;
  while (next_ < buckets_.size() && buckets_[next_].num_ready == buckets_[next_].slots.size()) {
    start(buckets_[next_++]);
  }
  // Lets reductions with several phases go on while backward computes.
  for (auto& other : buckets_) {
    if (other.work) {
      other.work->poll();
    }
  }
}

void Reducer::start(Bucket& bucket) {
  for (auto& slot : bucket.slots) {
    auto& grad = slot.parameter.mutable_grad();
    if (slot.used || (grad.defined() && grad.is_alias_of(slot.grad))) {
      continue; // Also a grad that an earlier backward has averaged: equal on all ranks, and so is its average.
    }
    if (grad.defined()) { // of a backward that was not reduced
      slot.grad.copy_(grad);
      grad = slot.grad;
    } else {
      slot.grad.zero_();
    }
  }
  log::debug("reduce {} {} bytes", bucket.name, bucket.memory.nbytes());
  bucket.work = group_->all_reduce(bucket.memory, comm::ReduceOp::kSum, group_->size(), bucket.name);
}

void Reducer::finish() {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  for (; next_ < buckets_.size(); ++next_) {
    start(buckets_[next_]);
  }
  auto votes = at::zeros({static_cast<std::int64_t>(num_slots_)}, at::kFloat);
  std::size_t i = 0;
  for (auto& bucket : buckets_) {
    for (auto& slot : bucket.slots) {
      votes.data_ptr<float>()[i++] = slot.used || slot.parameter.grad().defined();
    }
  }
  if (group_->size() > 1) {
    auto on_device = votes.to(buckets_.front().memory.device());
    group_->all_reduce(on_device, comm::ReduceOp::kMax, 1, "(which gradients exist)")->wait();
    votes = on_device.cpu();
  }
  for (auto& bucket : buckets_) {
    bucket.work->wait();
    bucket.work->release();
  }
  i = 0;
  for (auto& bucket : buckets_) {
    for (auto& slot : bucket.slots) {
      if (votes.data_ptr<float>()[i++] > 0 && !slot.parameter.grad().defined()) {
        slot.parameter.mutable_grad() = slot.grad;
      }
    }
  }
  clear_round();
}

void Reducer::clear_round() {
  for (auto& bucket : buckets_) {
    bucket.num_ready = 0;
    bucket.work.reset();
    for (auto& slot : bucket.slots) {
      slot.used = false;
    }
  }
  next_ = 0;
  armed_ = false;
  backward_.reset();
}

void Reducer::enter_no_sync() {
  const std::lock_guard lock(mutex_);
  ++no_sync_scopes_;
}

void Reducer::leave_no_sync() {
  const std::lock_guard lock(mutex_);
  --no_sync_scopes_;
}

void Reducer::reset() {
  const std::lock_guard lock(mutex_);
  for (auto& bucket : buckets_) {
    for (auto& slot : bucket.slots) {
      slot.parameter.mutable_grad() = at::Tensor();
    }
    if (bucket.work) {
      make_memory(bucket); // the old one may still be written to: it goes with the work
    }
  }
  clear_round();
}

std::string Reducer::explain() const {
  std::int64_t bytes = 0;
  for (const auto& bucket : buckets_) {
    bytes += static_cast<std::int64_t>(bucket.memory.nbytes());
  }
  auto text = fmt::format(
      "replicate over {} rank(s): {} tensors, gradients of {:.1f} MB in {} bucket(s)\n", group_->size(),
      parameters_.size(), bytes / 1e6, buckets_.size());
  for (const auto& bucket : buckets_) {
    text += fmt::format(
        "  {:<48} {:>4} tensors {:>10.1f} kB\n", bucket.name, bucket.slots.size(), bucket.memory.nbytes() / 1e3);
  }
  return text;
}

} // namespace ebb::shard
