#include "gradients.h"

#include "dispatch.h"
#include "ebb/base/log.h"
#include "engine.h"

#include <torch/torch.h>

#include <algorithm>
#include <utility>

namespace ebb::shard {

GradientReducer::GradientReducer(Engine& engine) : engine_(engine) {
  int root = -1;
  for (const auto& unit : engine.units()) {
    for (const auto& flat : unit->flats) {
      if (flat->requires_grad) {
        unit->num_trainable += static_cast<std::int64_t>(flat->members.size());
      }
    }
    if (unit->num_trainable == 0) {
      continue;
    }
    num_members_ += unit->num_trainable;
    buffer_bytes_ = std::max(buffer_bytes_, unit->reduce_bytes);
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
  return unit_buffers_[unit.index].narrow(0, flat.reduce_offset, flat.reduce_bytes()).view(flat.reduce_dtype);
}

at::Tensor GradientReducer::take_buffer() {
  if (free_buffers_.empty() && num_buffers_ >= static_cast<std::int64_t>(max_buffers())) {
    while (releasing_.empty() && !in_flight_.empty()) {
      max_in_flight_ == 1 ? move_on() : move_oldest_on();
    }
    if (!releasing_.empty()) {
      release_oldest();
    }
  }
  if (!free_buffers_.empty()) {
    auto buffer = std::move(free_buffers_.back());
    free_buffers_.pop_back();
    engine_.streams_.wait(buffer.free);
    return std::move(buffer.memory);
  }
  ++num_buffers_;
  const auto device = engine_.units().front()->flats.front()->device;
  return allocate_for_comm(engine_.options().comm_allocator, buffer_bytes_, device);
}

void GradientReducer::release_oldest() {
  auto& oldest = releasing_.front();
  engine_.streams_.run(Lane::kReduce, [&] {
    for (auto& work : oldest.works) {
      if (work) {
        work->release();
      }
    }
    engine_.streams_.record(oldest.buffer.free);
  });
  free_buffers_.push_back(std::move(oldest.buffer));
  releasing_.pop_front();
}

void GradientReducer::drop_hidden_gradients() {
  if (engine_.tier() || !in_flight_.empty()) {
    return; // they are not where activations go; or a reduction that goes on ends in them
  }
  for (const auto& unit : engine_.units()) {
    for (auto& flat : unit->flats) {
      if (!flat->collected && flat->flat_grad.defined() && flat->flat_grad.storage().use_count() == 1) {
        flat->flat_grad = at::Tensor();
      }
    }
  }
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
    member.in_shape(slot(unit, flat)).add_(grad);
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
    engine_.after_gradients(unit);
    start_ready();
  }
}

void GradientReducer::fill(Unit& unit) {
  auto& buffer = unit_buffers_[unit.index];
  if (!buffer.defined()) {
    buffer = take_buffer();
  }
  for (auto& flat : unit.flats) {
    if (!flat->requires_grad) {
      continue;
    }
    auto flat_slot = slot(unit, *flat);
    for (auto& member : flat->members) {
      if (member.pending.defined()) {
        member.in_shape(flat_slot).copy_(member.pending);
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

// Padding, and what got no gradient here, take part as zeros.
void GradientReducer::clear_gaps(FlatParameter& flat, const at::Tensor& input) {
  std::int64_t clean_to = 0;
  const auto clear_to = [&](std::int64_t end) {
    if (end > clean_to) {
      input.narrow(0, clean_to, end - clean_to).zero_();
    }
  };
  for (auto& member : flat.members) {
    if (std::exchange(member.filled, false)) {
      clear_to(member.offset);
      clean_to = member.offset + member.numel;
    }
  }
  clear_to(flat.padded_numel);
}

void GradientReducer::reduce(Unit& unit) {
  const at::NoGradGuard no_grad;
  const OwnAccess own;
  fill(unit);
  unit.reduced = true;
  if (engine_.reduces(unit)) {
    start(unit);
  } else {
    keep_local(unit);
  }
  if (!unit.reshard_after_forward && unit.reshard_after_backward && unit.frame && unit.pins == 0 && !unit.in_scope) {
    engine_.resident_.reshard(unit);
  }
}

// Gradient accumulation without communication.
void GradientReducer::keep_local(Unit& unit) {
  engine_.event("accumulate", unit);
  for (auto& flat : unit.flats) {
    if (!flat->requires_grad) {
      continue;
    }
    auto input = slot(unit, *flat);
    clear_gaps(*flat, input);
    if (flat->unsynced.defined()) {
      flat->unsynced.add_(input);
    } else {
      flat->unsynced = input.clone();
    }
    for (auto& member : flat->members) {
      member.unsynced = member.unsynced || member.used;
    }
  }
  free_buffers_.push_back({std::exchange(unit_buffers_[unit.index], at::Tensor()), Mark()}); // compute's all along
}

void GradientReducer::start(Unit& unit) {
  engine_.check_same_order("reduce", unit);
  engine_.event("reduce", unit);
  log::debug("reduce unit '{}' {} bytes", unit.name, unit.reduce_bytes);
  ++engine_.stats_.reduces;
  make_room(unit);

  InFlight reduction;
  reduction.unit = &unit;
  reduction.publishes = engine_.publishes(unit);
  for (auto& flat : unit.flats) {
    if (flat->requires_grad) {
      prepare(*flat, reduction.publishes);
    }
  }
  engine_.streams_.follow(Lane::kReduce);
  engine_.streams_.run(Lane::kReduce, [&] {
    for (auto& flat : unit.flats) {
      if (flat->requires_grad) {
        launch(*flat, reduction);
      }
    }
  });
  reduction.buffer.memory = std::exchange(unit_buffers_[unit.index], at::Tensor());
  in_flight_.push_back(std::move(reduction));
}

// The whole input of a reduction, and where its gradient goes to.
void GradientReducer::prepare(FlatParameter& flat, bool publishes) {
  auto input = slot(*flat.unit, flat);
  clear_gaps(flat, input);
  if (flat.unsynced.defined()) {
    input.add_(std::exchange(flat.unsynced, at::Tensor()));
  }
  const bool adds = accumulates(flat);
  const bool shared = flat.flat_grad.defined() && flat.flat_grad.storage().use_count() > 1 && !adds;
  if (publishes && (!flat.flat_grad.defined() || shared)) { // a user kept the last step's gradients: they stay theirs
    flat.flat_grad = adds || flat.tier ? flat.zeros(flat.grad_dtype)
                                       : at::empty({flat.shard_numel}, flat.shard.options().dtype(flat.grad_dtype));
  }
  if (engine_.faults_.scaled_gradient == flat.unit->index) {
    input.mul_(1.01);
  }
}

void GradientReducer::launch(FlatParameter& flat, InFlight& reduction) {
  const Unit& unit = *flat.unit;
  const auto input = slot(unit, flat);
  at::Tensor output = input;
  if (!unit.whole) {
    output = !reduction.publishes || accumulates(flat) || flat.tier || flat.grad_dtype != flat.reduce_dtype
                 ? at::empty({flat.shard_numel}, input.options())
                 : flat.flat_grad;
  }
  if (engine_.faults_.skipped_reduce == unit.index) {
    if (!unit.whole) {
      output.copy_(input.narrow(0, unit.group->rank() * flat.shard_numel, flat.shard_numel));
    }
    reduction.works.push_back(nullptr);
  } else {
    auto& ranks = unit.whole ? engine_.reduce_world() : engine_.reduce_group();
    const GradientReduction request{
        unit.name, input, output, ranks, unit.whole ? engine_.divide_factor() : inner_divisor(flat), unit.whole};
    const auto& hook = engine_.options().comm_hook;
    auto work = hook ? hook(request) : reduce_as_is(request);
    TORCH_CHECK_VALUE(
        work, "[fully_shard] expected comm_hook to return a Work for unit '", unit.name,
        "', got none; return what reduce_as_is() does when there is nothing of your own to wait for");
    reduction.works.push_back(engine_.meter_.measure(std::move(work)));
  }
  reduction.outputs.push_back(std::move(output));
}

// With copies of shards a sum passes through the reduction's dtype between the two collectives. There it is kept small
// for half types, which end at 65504, and exact, divided once at the end, for others.
double GradientReducer::inner_divisor(const FlatParameter& flat) const {
  if (!engine_.replicas()) {
    return engine_.divide_factor();
  }
  return c10::elementSize(flat.reduce_dtype) < 4 ? engine_.group().size() : 1.0;
}

} // namespace ebb::shard
