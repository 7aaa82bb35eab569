#include "gradients.h"

#include "dispatch.h"
#include "ebb/base/log.h"
#include "engine.h"

#include <torch/torch.h>

#include <algorithm>

namespace ebb::shard {
namespace {

// One reduction is filled while another is under way.
constexpr std::int64_t kMaxBuffers = 2;

std::int64_t trainable_bytes(const Unit& unit) {
  std::int64_t bytes = 0;
  for (const auto& flat : unit.flats) {
    if (flat->requires_grad) {
      bytes = flat->frame_offset + flat->padded_bytes();
    }
  }
  return bytes;
}

} // namespace

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

void GradientReducer::drop_hidden_gradients() {
  for (const auto& unit : engine_.units()) {
    for (auto& flat : unit->flats) {
      if (flat->flat_grad.defined() && flat->flat_grad.storage().use_count() == 1) {
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
    if (!flat->requires_grad) {
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
    if (!flat->requires_grad) {
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
      flat->flat_grad = accumulates ? at::zeros({flat->shard_numel}, flat->shard.options())
                                    : at::empty({flat->shard_numel}, flat->shard.options());
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
  if (engine_.options().strategy == Strategy::kShardGradOp && unit.frame && unit.pins == 0 &&
      !engine_.in_full_parameters()) {
    engine_.resident_.reshard(unit);
  }
}

void GradientReducer::collect(InFlight& reduction) {
  const at::NoGradGuard no_grad;
  std::size_t i = 0;
  for (auto& flat : reduction.unit->flats) {
    if (!flat->requires_grad) {
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

} // namespace ebb::shard
