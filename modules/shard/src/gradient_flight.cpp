#include "engine.h"
#include "gradients.h"

#include <torch/torch.h>

#include <algorithm>
#include <utility>

// Reductions under way: from their start to the shards.
namespace ebb::shard {

bool GradientReducer::accumulates_on_leaves(const FlatParameter& flat) {
  return std::any_of(
      flat.members.begin(), flat.members.end(), [](const Member& member) { return member.leaf.grad().defined(); });
}

bool GradientReducer::accumulates(const FlatParameter& flat) {
  return flat.collected || accumulates_on_leaves(flat);
}

void GradientReducer::make_room(const Unit& unit) {
  const auto of_this_unit = [&unit](const InFlight& reduction) { return reduction.unit == &unit; };
  while (std::any_of(in_flight_.begin(), in_flight_.end(), of_this_unit)) { // of a backward before
    move_on();
  }
  if (max_in_flight_ == 1) {
    move_on();
  }
  while (max_in_flight_ > 1 && in_flight_.size() >= max_in_flight_) {
    move_oldest_on();
  }
}

// Lets what is under way go one stage further: from the reduce-scatter to the all-reduce between copies, from the last
// stage to the shards.
void GradientReducer::move_on() {
  std::deque<InFlight> still;
  while (!in_flight_.empty()) {
    auto reduction = std::move(in_flight_.front());
    in_flight_.pop_front();
    if (start_replica_stage(reduction)) {
      still.push_back(std::move(reduction));
    } else {
      collect(reduction);
      releasing_.push_back(std::move(reduction));
    }
  }
  in_flight_ = std::move(still);
}

void GradientReducer::move_oldest_on() {
  auto reduction = std::move(in_flight_.front());
  in_flight_.pop_front();
  if (start_replica_stage(reduction)) {
    in_flight_.push_front(std::move(reduction));
  } else {
    collect(reduction);
    releasing_.push_back(std::move(reduction));
  }
}

bool GradientReducer::start_replica_stage(InFlight& reduction) {
  if (!engine_.replicas() || reduction.unit->whole || !reduction.publishes || !reduction.replica_works.empty()) {
    return false;
  }
  engine_.streams_.run(Lane::kReduce, [&] {
    std::size_t i = 0;
    for (auto& flat : reduction.unit->flats) {
      if (!flat->requires_grad) {
        continue;
      }
      if (reduction.works[i]) {
        reduction.works[i]->wait();
      }
      if (flat->partial.defined()) {
        reduction.outputs[i].add_(std::exchange(flat->partial, at::Tensor()));
      }
      reduction.replica_works.push_back(engine_.meter_.measure(engine_.replicas()->all_reduce(
          reduction.outputs[i], comm::ReduceOp::kSum, engine_.divide_factor() / inner_divisor(*flat),
          reduction.unit->name)));
      ++i;
    }
  });
  ++engine_.stats_.all_reduces;
  engine_.event("all_reduce", *reduction.unit);
  return true;
}

void GradientReducer::collect(InFlight& reduction) {
  const at::NoGradGuard no_grad;
  engine_.streams_.run(Lane::kReduce, [&] {
    const auto& works = reduction.replica_works.empty() ? reduction.works : reduction.replica_works;
    std::size_t i = 0;
    for (auto& flat : reduction.unit->flats) {
      if (!flat->requires_grad) {
        continue;
      }
      if (works[i]) {
        works[i]->wait();
      }
      collect(*flat, reduction, std::exchange(reduction.outputs[i], at::Tensor()));
      ++i;
    }
    if (reduction.unit->whole) {
      engine_.stage_.finish_stores(); // their source, the reduce buffer, is filled again
    }
  });
  if (reduction.publishes) {
    step_in_backward(*reduction.unit);
  }
}

// From the reduction to the gradients of the leaves.
void GradientReducer::collect(FlatParameter& flat, const InFlight& reduction, at::Tensor output) {
  if (!reduction.publishes) {
    flat.partial = flat.partial.defined() ? flat.partial.add_(output) : output;
    return;
  }
  if (engine_.options().gradient_hook) {
    engine_.options().gradient_hook(reduction.unit->name, output);
  }
  const bool collected = std::exchange(flat.collected, true);
  if (output.is_same(flat.flat_grad)) {
    return;
  }
  if (flat.tier && !collected && !accumulates_on_leaves(flat)) {
    engine_.stage_.store(flat.flat_grad, output);
    return;
  }
  output = output.to(flat.flat_grad.device());
  for (auto& member : flat.members) {
    const auto part = output.narrow(0, member.leaf.storage_offset(), member.leaf.numel());
    if (member.leaf.grad().defined()) {
      member.leaf.mutable_grad().add_(part);
      continue;
    }
    engine_.stage_.finish_stores();
    const auto hidden = flat.flat_grad.narrow(0, member.leaf.storage_offset(), member.leaf.numel());
    collected ? hidden.add_(part) : hidden.copy_(part);
  }
}

void GradientReducer::step_in_backward(Unit& unit) {
  if (!engine_.optimizer_in_backward_) {
    return;
  }
  engine_.stage_.finish_stores();
  engine_.streams_.join(Lane::kReduce);
  for (auto& flat : unit.flats) {
    if (!flat->requires_grad) {
      continue;
    }
    flat->collected = false;
    for (auto& member : flat->members) {
      show_gradient(*flat, member);
      engine_.optimizer_in_backward_(member.name, member.leaf);
    }
  }
}

void GradientReducer::collect_all() {
  while (!in_flight_.empty()) {
    move_on();
  }
  while (!releasing_.empty()) {
    release_oldest();
  }
  engine_.stage_.finish_stores();
  engine_.streams_.join(Lane::kReduce);
}

} // namespace ebb::shard
