#include "gradients.h"

#include "dispatch.h"
#include "ebb/base/error.h"
#include "ebb/base/log.h"
#include "engine.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <algorithm>
#include <sstream>

namespace ebb::shard {
namespace {

// One reduction is filled while another is under way.
constexpr std::int64_t kMaxBuffers = 2;

bool trainable(const FlatParameter& flat) {
  return flat.requires_grad;
}

// Hooks are owned by the model's parameters, which may outlive the engine: they go through the owner block.
struct PostAccumulate final : torch::autograd::PostAccumulateGradHook {
  PostAccumulate(std::shared_ptr<PageOwner> owner, std::size_t member) : owner(std::move(owner)), member(member) {}
  void operator()(const at::Tensor& /*parameter*/) override {
    if (auto* engine = owner->engine.load(std::memory_order_acquire)) {
      engine->on_gradient(*owner->flat->unit, *owner->flat, owner->flat->members[member]);
    }
  }
  std::shared_ptr<PageOwner> owner;
  std::size_t member;
};

std::int64_t trainable_bytes(const Unit& unit) {
  std::int64_t bytes = 0;
  for (const auto& flat : unit.flats) {
    if (trainable(*flat)) {
      bytes = flat->frame_offset + flat->padded_bytes();
    }
  }
  return bytes;
}

} // namespace

void attach_gradient_hooks(FlatParameter& flat) {
  if (!trainable(flat)) {
    return;
  }
  for (std::size_t i = 0; i < flat.members.size(); ++i) {
    auto& parameter = flat.members[i].parameter;
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<PostAccumulate>(flat.owner, i));
    // Runs before the gradient is accumulated: see Note [Sentinel gradients].
    parameter.register_hook([owner = flat.owner, i](at::Tensor grad) {
      if (owner->engine.load(std::memory_order_acquire)) {
        owner->flat->members[i].parameter.mutable_grad() = at::Tensor();
      }
      return grad;
    });
  }
}

GradientReducer::GradientReducer(Engine& engine) : engine_(engine) {
  int root = -1;
  for (const auto& unit : engine.units()) {
    for (const auto& flat : unit->flats) {
      if (trainable(*flat)) {
        unit->num_trainable += static_cast<std::int64_t>(flat->members.size());
      }
    }
    if (unit->num_trainable == 0) {
      continue;
    }
    num_members_ += unit->num_trainable;
    buffer_bytes_ = std::max(buffer_bytes_, trainable_bytes(*unit));
    if (unit->name == "(root)") {
      root = unit->index; // its embedding gets its gradient last, though its head is used last
    } else {
      order_.insert(order_.begin(), unit->index);
    }
  }
  if (root >= 0) {
    order_.push_back(root);
  }
  unit_buffers_.resize(engine.units().size());
}

GradientReducer::~GradientReducer() = default;

at::Tensor GradientReducer::slot(const Unit& unit, const FlatParameter& flat) const {
  return unit_buffers_[unit.index].narrow(0, flat.frame_offset, flat.padded_bytes()).view(flat.dtype);
}

at::Tensor GradientReducer::take_buffer() {
  if (free_buffers_.empty() && num_buffers_ >= kMaxBuffers) {
    if (releasing_.empty() && !in_flight_.empty()) {
      collect(in_flight_.front());
      releasing_.push_back(std::move(in_flight_.front()));
      in_flight_.pop_front();
    }
    if (!releasing_.empty()) {
      for (auto& work : releasing_.front().works) {
        if (work) {
          work->release();
        }
      }
      free_buffers_.push_back(std::move(releasing_.front().buffer));
      releasing_.pop_front();
    }
  }
  if (!free_buffers_.empty()) {
    auto buffer = std::move(free_buffers_.back());
    free_buffers_.pop_back();
    return buffer;
  }
  ++num_buffers_;
  const auto device = engine_.units().front()->flats.front()->device;
  return at::empty({buffer_bytes_}, at::TensorOptions().dtype(at::kByte).device(device));
}

void GradientReducer::on_gradient(Unit& unit, FlatParameter& flat, Member& member) {
  const at::NoGradGuard no_grad;
  auto grad = member.parameter.grad();
  member.parameter.mutable_grad() = member.sentinel;
  if (!grad.defined()) {
    return;
  }
  if (grad.is_sparse()) {
    grad = grad.to_dense();
  }
  const bool first = !member.used;
  member.used = true;
  if (unit.reduced) {
    // A re-entrant backward (a checkpoint that calls backward itself) delivers a parameter's gradient in parts.
    again_ = true;
    member.pending = member.pending.defined() ? member.pending.add(grad) : grad;
    return;
  }
  if (member.filled) {
    slot(unit, flat).narrow(0, member.offset, member.numel).view(member.sizes).add_(grad);
    return;
  }
  if (member.pending.defined()) {
    member.pending = member.pending.add(grad);
    return;
  }
  member.pending = std::move(grad);
  unit.pending_bytes += member.numel * flat.element_size();
  unit.num_ready += first;
  // A unit like the root, whose head is done at once and whose embedding comes last, must not occupy a buffer for the
  // whole of backward for the sake of a few small gradients.
  if (complete(unit) || unit.pending_bytes * 8 > unit.bytes) {
    fill(unit);
  }
  if (complete(unit)) {
    ready_order_.push_back(unit.index);
    start_ready();
  }
}

void GradientReducer::fill(Unit& unit) {
  auto& buffer = unit_buffers_[unit.index];
  if (!buffer.defined()) {
    buffer = take_buffer();
  }
  for (auto& flat : unit.flats) {
    if (!trainable(*flat)) {
      continue;
    }
    auto flat_slot = slot(unit, *flat);
    for (auto& member : flat->members) {
      if (member.pending.defined()) {
        flat_slot.narrow(0, member.offset, member.numel).view(member.sizes).copy_(member.pending);
        member.pending = at::Tensor();
        member.filled = true;
      }
    }
  }
  unit.pending_bytes = 0;
}

void GradientReducer::start_ready() {
  while (next_ < order_.size() && complete(*engine_.units()[order_[next_]])) {
    reduce(*engine_.units()[order_[next_]]);
    ++next_;
  }
}

void GradientReducer::reduce(Unit& unit) {
  const at::NoGradGuard no_grad;
  const OwnAccess own;
  auto& group = engine_.group();
  const auto divisor = static_cast<double>(group.size());
  const bool sharded = engine_.options().strategy != Strategy::kNoShard;
  fill(unit);
  engine_.check_same_order("reduce", unit);
  engine_.event("reduce", unit);
  log::debug("reduce unit '{}' {} bytes", unit.name, trainable_bytes(unit));
  ++engine_.stats_.reduces;
  while (!in_flight_.empty()) {
    collect(in_flight_.front());
    releasing_.push_back(std::move(in_flight_.front()));
    in_flight_.pop_front();
  }

  InFlight reduction;
  reduction.unit = &unit;
  for (auto& flat : unit.flats) {
    if (!trainable(*flat)) {
      continue;
    }
    auto input = slot(unit, *flat);
    // Padding and what got no gradient here take part as zeros.
    std::int64_t clean_to = 0;
    bool accumulates = false;
    for (auto& member : flat->members) {
      input.narrow(0, clean_to, member.offset - clean_to).zero_();
      if (!member.filled) {
        input.narrow(0, member.offset, member.numel).zero_();
      }
      clean_to = member.offset + member.numel;
      member.filled = false;
      accumulates = accumulates || member.leaf.grad().defined();
    }
    input.narrow(0, clean_to, flat->padded_numel - clean_to).zero_();

    const bool shared = flat->flat_grad.defined() && flat->flat_grad.storage().use_count() > 1 && !accumulates;
    if (!flat->flat_grad.defined() || shared) { // a user kept the last step's gradients: they stay theirs
      flat->flat_grad = at::zeros({flat->shard_numel}, flat->shard.options());
    }
    auto output = accumulates ? at::empty_like(flat->flat_grad) : flat->flat_grad;
    if (engine_.faults_.scaled_gradient == unit.index) {
      input.mul_(1.01);
    }
    if (engine_.faults_.skipped_reduce == unit.index) {
      const auto own = sharded ? input.narrow(0, group.rank() * flat->shard_numel, flat->shard_numel) : input;
      output.copy_(own);
      input.copy_(output.repeat({input.numel() / output.numel()}));
      reduction.works.push_back(nullptr);
    } else if (sharded) {
      reduction.works.push_back(group.reduce_scatter(output, input, divisor, unit.name));
    } else {
      reduction.works.push_back(group.all_reduce(input, comm::ReduceOp::kSum, divisor, unit.name));
    }
    reduction.outputs.push_back(std::move(output));
  }
  reduction.buffer = std::move(unit_buffers_[unit.index]);
  unit_buffers_[unit.index] = at::Tensor();
  in_flight_.push_back(std::move(reduction));
  unit.reduced = true;
  if (engine_.options().strategy == Strategy::kShardGradOp && unit.frame && unit.pins == 0 && !engine_.in_full_parameters()) {
    engine_.reshard(unit);
  }
}

void GradientReducer::collect(InFlight& reduction) {
  const at::NoGradGuard no_grad;
  std::size_t i = 0;
  for (auto& flat : reduction.unit->flats) {
    if (!trainable(*flat)) {
      continue;
    }
    if (reduction.works[i]) {
      reduction.works[i]->wait();
    }
    auto output = std::exchange(reduction.outputs[i], at::Tensor());
    if (engine_.options().strategy == Strategy::kNoShard) {
      output.copy_(reduction.buffer.narrow(0, flat->frame_offset, flat->padded_bytes()).view(flat->dtype));
    }
    ++i;
    if (output.is_same(flat->flat_grad)) {
      continue;
    }
    for (auto& member : flat->members) {
      const auto part = output.narrow(0, member.leaf.storage_offset(), member.leaf.numel());
      if (member.leaf.grad().defined()) {
        member.leaf.mutable_grad().add_(part);
      } else {
        flat->flat_grad.narrow(0, member.leaf.storage_offset(), member.leaf.numel()).copy_(part);
      }
    }
  }
}

void GradientReducer::collect_all() {
  for (; !in_flight_.empty(); in_flight_.pop_front()) {
    collect(in_flight_.front());
    releasing_.push_back(std::move(in_flight_.front()));
  }
  for (; !releasing_.empty(); releasing_.pop_front()) {
    for (auto& work : releasing_.front().works) {
      if (work) {
        work->release();
      }
    }
    free_buffers_.push_back(std::move(releasing_.front().buffer));
  }
}

void GradientReducer::finish() {
  const auto* only_some = torch::autograd::get_current_graph_task_exec_info();
  if (only_some && !only_some->empty() && ready_order_.empty() && next_ == 0 && !again_) {
    // autograd::grad(), or backward(inputs) that ends elsewhere: no parameter accumulates on any rank.
    bool any = false;
    for (const auto& unit : engine_.units()) {
      any = any || unit->num_ready > 0;
    }
    if (!any) {
      return;
    }
  }
  for (bool more = true; more;) {
    for (; next_ < order_.size(); ++next_) {
      reduce(*engine_.units()[order_[next_]]);
    }
    collect_all();
    const auto votes = vote(again_);
    show_gradients(votes);
    more = votes[num_members_].item<float>() > 0;
    const bool reorder = votes[num_members_ + 1].item<float>() > 0;
    if (reorder) {
      agree_on_order();
    }
    if (more) { // late parts of gradients: one more round over all units
      next_ = 0;
      again_ = false;
      for (const auto& unit : engine_.units()) {
        unit->reduced = false;
      }
    }
  }
  clear_round();
}

// Which members got a gradient on any rank; then, whether any rank needs another round, and whether rank 0 saw the units
// ready in another order than the agreed one.
at::Tensor GradientReducer::vote(bool again) {
  auto votes = at::zeros({static_cast<std::int64_t>(num_members_) + 2}, at::kFloat);
  auto* vote = votes.data_ptr<float>();
  std::size_t i = 0;
  for (const auto& unit : engine_.units()) {
    for (const auto& flat : unit->flats) {
      if (trainable(*flat)) {
        for (const auto& member : flat->members) {
          vote[i++] = member.used;
        }
      }
    }
  }
  vote[num_members_] = again;
  const bool whole = ready_order_.size() == order_.size();
  vote[num_members_ + 1] = engine_.group().rank() == 0 && whole && ready_order_ != order_;
  if (engine_.group().size() > 1) {
    const auto device = engine_.units().front()->flats.front()->device;
    auto on_device = votes.to(device);
    engine_.group().all_reduce(on_device, comm::ReduceOp::kMax, 1, "(which gradients exist)")->wait();
    votes = on_device.cpu();
  }
  return votes;
}

void GradientReducer::show_gradients(const at::Tensor& votes) {
  const auto* vote = votes.data_ptr<float>();
  std::size_t i = 0;
  for (const auto& unit : engine_.units()) {
    for (const auto& flat : unit->flats) {
      if (!trainable(*flat)) {
        continue;
      }
      for (auto& member : flat->members) {
        const bool used_somewhere = vote[i++] > 0;
        if (used_somewhere && !member.leaf.grad().defined()) {
          // On the same memory but not an autograd view: Optimizer::zero_grad() detaches grads in place.
          member.leaf.mutable_grad() = tensor_on(
              flat->flat_grad.storage(), /*paged=*/false, flat->dtype, member.leaf.storage_offset(), {member.leaf.numel()});
        }
      }
    }
  }
}

void GradientReducer::agree_on_order() {
  std::ostringstream mine;
  for (const int index : ready_order_) {
    mine << index << ' ';
  }
  std::istringstream rank0(engine_.group().size() > 1 ? engine_.group().exchange(mine.str()).front() : mine.str());
  order_.clear();
  for (int index = 0; rank0 >> index;) {
    order_.push_back(index);
  }
}

void GradientReducer::clear_round() {
  for (const auto& unit : engine_.units()) {
    unit->num_ready = 0;
    unit->pending_bytes = 0;
    unit->reduced = false;
    for (auto& flat : unit->flats) {
      for (auto& member : flat->members) {
        member.pending = at::Tensor();
        member.filled = false;
        member.used = false;
      }
    }
  }
  ready_order_.clear();
  next_ = 0;
  again_ = false;
}

void GradientReducer::abandon() {
  // Peers or the transport may still be using these buffers: they go with their works.
  in_flight_.clear();
  releasing_.clear();
  for (auto& buffer : unit_buffers_) {
    buffer = at::Tensor();
  }
  num_buffers_ = static_cast<std::int64_t>(free_buffers_.size());
  for (const auto& unit : engine_.units()) {
    for (auto& flat : unit->flats) {
      if (trainable(*flat)) {
        for (auto& member : flat->members) {
          member.parameter.mutable_grad() = at::Tensor();
        }
      }
    }
  }
  clear_round();
}

} // namespace ebb::shard
