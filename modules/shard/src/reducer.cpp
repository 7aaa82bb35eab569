#include "reducer.h"

#include "ebb/base/log.h"
#include "sync.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <utility>

namespace ebb::shard {
namespace {

struct ReplicaPostAccumulate final : torch::autograd::PostAccumulateGradHook {
  explicit ReplicaPostAccumulate(std::function<void()> call) : call(std::move(call)) {}
  void operator()(const at::Tensor& /*parameter*/) override {
    call();
  }
  std::function<void()> call;
};

} // namespace

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
          parameter, std::make_unique<ReplicaPostAccumulate>([weak = weak_from_this(), b, s] {
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
  TORCH_CHECK_VALUE(
      !ended_,
      "[replicate] a backward begins while the gradients of the last one are still on their way; call "
      "finalize_backward() after each, or set_manual_backward_finalization(false)");
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
        reducer->end_backward();
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
  ++slot.hits;
  ++bucket.hits;
  if (bucket.work && learned()) {
    surprise_ = slot.name; // Thrown at the end: until then the other ranks need this one.
    return;
  }
  TORCH_CHECK_VALUE(
      !bucket.work, "[replicate] '", slot.name, "' in ", bucket.name,
      " received a second gradient in one backward after its bucket was sent (a checkpoint that calls backward "
      "itself?); use one backward per step, or promise a static_graph");
  if (!bucket.memory.defined()) {
    make_memory(bucket);
  }
  if (!options_.batched_grad_copy && !grad.is_alias_of(slot.grad)) {
    slot.grad.copy_(grad);
    grad = slot.grad;
  }
  bucket.num_ready += !slot.used;
  slot.used = true;
  while (next_ < buckets_.size() && is_ready(buckets_[next_])) {
    start(buckets_[next_++]);
  }
  // Lets reductions with several phases go on while backward computes.
  for (auto& other : buckets_) {
    if (other.work) {
      other.work->poll();
    }
  }
}

bool Reducer::is_ready(const Bucket& bucket) const {
  if (options_.static_graph) {
    return learned_ && bucket.hits >= bucket.expected_hits;
  }
  return bucket.num_ready == bucket.slots.size();
}

void Reducer::start(Bucket& bucket) {
  const auto exists = [](const Slot& slot) { return slot.exists; };
  if (learned() && std::none_of(bucket.slots.begin(), bucket.slots.end(), exists)) {
    return; // on no rank
  }
  if (!bucket.memory.defined()) {
    make_memory(bucket);
  }
  std::vector<at::Tensor> from;
  std::vector<at::Tensor> to;
  for (auto& slot : bucket.slots) {
    auto& grad = slot.parameter.mutable_grad();
    if (!grad.defined()) {
      slot.grad.zero_();
    } else if (!grad.is_alias_of(slot.grad)) { // to be copied now, or of a backward that was not reduced
      from.push_back(std::exchange(grad, slot.grad));
      to.push_back(slot.grad);
    } // Else it is there, or an earlier backward has averaged it: equal on all ranks, and so is its average.
  }
  if (!from.empty()) {
    at::_foreach_copy_(to, from);
  }
  log::debug("reduce {} {} bytes", bucket.name, bucket.memory.nbytes());
  bucket.work = group_->all_reduce(bucket.memory, comm::ReduceOp::kSum, group_->size(), bucket.name);
}

void Reducer::start_vote(comm::Communicator& group) {
  votes_ = at::zeros({static_cast<std::int64_t>(num_slots_)}, at::kFloat);
  std::size_t i = 0;
  for (auto& bucket : buckets_) {
    for (auto& slot : bucket.slots) {
      votes_.data_ptr<float>()[i++] = slot.used || slot.parameter.grad().defined();
    }
  }
  if (group.size() > 1) {
    votes_ = votes_.to(buckets_.front().slots.front().parameter.device());
    vote_ = group.all_reduce(votes_, comm::ReduceOp::kMax, 1, "(which gradients exist)");
  }
}

void Reducer::take_vote() {
  if (vote_) {
    vote_->wait();
    vote_.reset();
    votes_ = votes_.cpu();
  }
  std::size_t i = 0;
  for (auto& bucket : buckets_) {
    for (auto& slot : bucket.slots) {
      slot.exists = votes_.data_ptr<float>()[i++] > 0;
    }
  }
}

void Reducer::end_backward() {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  const bool first_vote = options_.skip_unused && !learned();
  if (first_vote) {
    start_vote(vote_group_ ? *vote_group_ : *group_);
    take_vote();
  }
  for (; next_ < buckets_.size(); ++next_) {
    auto& bucket = buckets_[next_];
    const auto exists = [](const Slot& slot) { return slot.exists; };
    if (!first_vote || std::any_of(bucket.slots.begin(), bucket.slots.end(), exists)) {
      start(bucket);
    }
  }
  if (!first_vote && !learned()) {
    start_vote(*group_);
  }
  if (manual_) {
    ended_ = true;
  } else {
    finish();
  }
}

void Reducer::finish() {
  const at::NoGradGuard no_grad;
  if (!options_.skip_unused && !learned()) {
    take_vote();
  }
  for (auto& bucket : buckets_) {
    if (bucket.work) {
      bucket.work->wait();
      bucket.work->release();
    }
  }
  for (auto& bucket : buckets_) {
    for (auto& slot : bucket.slots) {
      if (slot.exists && !slot.parameter.grad().defined()) {
        slot.parameter.mutable_grad() = slot.grad;
      }
    }
  }
  if (options_.broadcast_buffers) {
    sync_buffers();
  }
  if (options_.static_graph) {
    check_promise();
  }
  clear_round();
}

void Reducer::check_promise() {
  auto broken = std::exchange(surprise_, {});
  for (auto& bucket : buckets_) {
    for (auto& slot : bucket.slots) {
      if (!learned_) {
        slot.expected_hits = slot.hits;
        bucket.expected_hits += slot.hits;
      } else if (slot.hits != slot.expected_hits && broken.empty()) {
        broken = slot.name;
      }
    }
  }
  learned_ = true;
  if (!broken.empty()) {
    reset();
    TORCH_CHECK_VALUE(
        false, "[replicate] static_graph: '", broken,
        "' did not get as many gradients in this step as in the first; the promise holds for every step that reduces, "
        "so leave static_graph out for a model that changes");
  }
}

void Reducer::clear_round() {
  for (auto& bucket : buckets_) {
    bucket.num_ready = 0;
    bucket.hits = 0;
    bucket.work.reset();
    for (auto& slot : bucket.slots) {
      slot.used = false;
      slot.hits = 0;
    }
    if (options_.lazy_bucket_allocation) {
      release_memory(bucket);
    }
  }
  next_ = 0;
  armed_ = false;
  ended_ = false;
  vote_.reset();
  surprise_.clear();
  backward_.reset();
}

void Reducer::set_manual_finalization(bool manual) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_VALUE(
      !armed_ || backward_.expired(),
      "[set_manual_backward_finalization] expected to be called between steps, and a backward is running");
  TORCH_CHECK_VALUE(
      !ended_,
      "[set_manual_backward_finalization] the last backward waits for its end; call finalize_backward() first");
  manual_ = manual;
}

void Reducer::finalize() {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_VALUE(
      ended_,
      "[finalize_backward] expected a backward that waits for its end, got none; call it once after each "
      "backward() that reduces, with set_manual_backward_finalization(true) before");
  ended_ = false; // Whatever fails now, the next backward drops.
  finish();
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
      release_memory(bucket); // it may still be written to: it goes with the work
      bucket.released.reset();
      if (!options_.lazy_bucket_allocation) {
        make_memory(bucket);
      }
    }
  }
  clear_round();
}

} // namespace ebb::shard
