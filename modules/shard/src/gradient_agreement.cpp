#include "engine.h"
#include "gradients.h"
#include "sync.h"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <sstream>

namespace ebb::shard {

// autograd::grad(), or backward(inputs) that ends elsewhere: no parameter accumulates on any rank.
bool GradientReducer::accumulates_nothing() const {
  const auto* only_some = torch::autograd::get_current_graph_task_exec_info();
  return only_some && !only_some->empty() && ready_order_.empty() && next_ == 0 && !again_ &&
         !any_unit([](const Unit& unit) { return unit.num_ready > 0; });
}

void GradientReducer::start_rest() {
  for (; next_ < order_.size(); ++next_) {
    reduce(*engine_.units()[order_[next_]]);
  }
}

void GradientReducer::finish() {
  if (accumulates_nothing()) {
    return;
  }
  const at::NoGradGuard no_grad;
  for (bool more = true; more;) {
    start_rest();
    collect_all();
    if (any_unit([this](const Unit& unit) { return engine_.reduces(unit); })) {
      const auto votes = vote(again_);
      show_gradients(votes);
      more = votes[num_members_].item<float>() > 0;
      if (votes[num_members_ + 1].item<float>() > 0) {
        agree_on_order();
      }
    } else {
      more = again_;
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

void GradientReducer::postpone() {
  if (accumulates_nothing()) {
    return;
  }
  const at::NoGradGuard no_grad;
  start_rest();
  for (const auto& unit : engine_.units()) {
    for (auto& flat : unit->flats) {
      for (auto& member : flat->members) {
        member.unsynced = member.unsynced || member.used;
        if (member.pending.defined()) { // came after its unit was reduced: goes along with the next reduction
          if (!flat->unsynced.defined()) {
            flat->unsynced =
                at::zeros({flat->padded_numel}, at::TensorOptions(flat->reduce_dtype).device(flat->device));
          }
          member.in_shape(flat->unsynced).add_(member.pending);
        }
      }
    }
  }
  clear_round();
}

// Reductions between copies that have not begun are left out: this rank waits for nothing that its peers do not owe it.
void GradientReducer::drop_postponed() {
  if (in_flight_.empty() && releasing_.empty()) {
    return;
  }
  engine_.streams_.run(Lane::kReduce, [&] {
    for (auto& reduction : in_flight_) {
      for (const auto* works : {&reduction.works, &reduction.replica_works}) {
        for (const auto& work : *works) {
          if (work) {
            work->wait();
          }
        }
      }
      reduction.outputs.clear();
    }
  });
  std::move(in_flight_.begin(), in_flight_.end(), std::back_inserter(releasing_));
  in_flight_.clear();
  while (!releasing_.empty()) {
    release_oldest();
  }
  engine_.stage_.finish_stores();
  engine_.streams_.join(Lane::kReduce);
}

template <class Predicate>
bool GradientReducer::any_unit(Predicate predicate) const {
  return std::any_of(order_.begin(), order_.end(), [&](int index) { return predicate(*engine_.units()[index]); });
}

// Which members got a gradient on any rank; then, whether any rank needs another round, and whether rank 0 saw the units
// ready in another order than the agreed one.
at::Tensor GradientReducer::vote(bool again) {
  // Memory of its own and not an operator's: in a dry run those have none.
  const auto memory = std::make_shared<std::vector<float>>(num_members_ + 2);
  auto& vote = *memory;
  std::size_t i = 0;
  for (const auto& unit : engine_.units()) {
    for (const auto& flat : unit->flats) {
      if (flat->requires_grad) {
        for (const auto& member : flat->members) {
          vote[i++] = engine_.publishes(*unit) && (member.used || member.unsynced);
        }
      }
    }
  }
  vote[num_members_] = again;
  const bool whole = ready_order_.size() == order_.size();
  // Where nothing leaves the shard axis, neither does the vote; the order is for all ranks to change together.
  const bool everywhere = any_unit([this](const Unit& unit) { return engine_.publishes(unit); });
  auto& ranks = everywhere ? engine_.reduce_world() : engine_.reduce_group();
  vote[num_members_ + 1] = everywhere && ranks.rank() == 0 && whole && ready_order_ != order_;
  auto votes = at::from_blob(
      vote.data(), {static_cast<std::int64_t>(vote.size())}, [memory](void*) {}, at::TensorOptions(at::kFloat));
  if (ranks.size() > 1) {
    // In host memory where the group serves that: the host need not wait for the device then.
    all_reduce_small(ranks, votes, comm::ReduceOp::kMax, "(which gradients exist)");
  }
  return votes;
}

void GradientReducer::show_gradients(const at::Tensor& votes) {
  const auto* vote = votes.data_ptr<float>();
  std::size_t i = 0;
  for (const auto& unit : engine_.units()) {
    for (const auto& flat : unit->flats) {
      if (!flat->requires_grad) {
        continue;
      }
      flat->collected = flat->collected && !engine_.publishes(*unit);
      for (auto& member : flat->members) {
        const bool used_somewhere = vote[i++] > 0;
        member.unsynced = (member.unsynced || (member.used && engine_.reduces(*unit))) && !engine_.publishes(*unit);
        if (used_somewhere && !engine_.optimizer_in_backward_) {
          show_gradient(*flat, member);
        }
      }
    }
  }
}

void GradientReducer::show_gradient(FlatParameter& flat, Member& member) {
  if (!member.leaf.grad().defined()) {
    // On the same memory but not an autograd view: Optimizer::zero_grad() detaches grads in place.
    member.leaf.mutable_grad() = tensor_on(
        flat.flat_grad.storage(), /*paged=*/false, flat.grad_dtype, member.leaf.storage_offset(),
        {member.leaf.numel()});
  }
}

void GradientReducer::agree_on_order() {
  std::ostringstream mine;
  for (const int index : ready_order_) {
    mine << index << ' ';
  }
  auto& ranks = engine_.reduce_world();
  std::istringstream rank0(ranks.size() > 1 ? ranks.exchange(mine.str()).front() : mine.str());
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
  engine_.forget_unsynced();
  for (const auto& unit : engine_.units()) {
    for (auto& flat : unit->flats) {
      if (flat->requires_grad) {
        for (auto& member : flat->members) {
          member.parameter.mutable_grad() = at::Tensor();
        }
      }
    }
  }
  clear_round();
}

} // namespace ebb::shard
