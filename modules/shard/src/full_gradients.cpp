#include "ebb/base/error.h"
#include "engine.h"

#include <torch/torch.h>

#include <utility>

// The gradients of a full-parameter scope that was asked for them.
namespace ebb::shard {
namespace {

bool has_gradient(const Member& member) {
  return member.leaf.grad().defined();
}

} // namespace

// They are gathered: a rank that has dropped one would leave the others waiting.
void Engine::check_same_gradients(const std::vector<int>& units) {
  std::string mine;
  std::vector<const Member*> members;
  for (const int index : units) {
    for (const auto& flat : units_[index]->flats) {
      for (const auto& member : flat->members) {
        mine += has_gradient(member) ? '1' : '0';
        members.push_back(&member);
      }
    }
  }
  if (world().size() == 1) {
    return;
  }
  const auto all = world().exchange(mine);
  for (int rank = 1; rank < world().size(); ++rank) {
    for (std::size_t i = 0; i < members.size(); ++i) {
      if (all[rank].at(i) != all[0][i]) {
        EBB_THROW(
            IncompatibleStateError, "[full_parameters] with_grads: '", members[i]->name, "' has a gradient on rank ",
            all[0][i] == '1' ? 0 : rank, " and none on rank ", all[0][i] == '1' ? rank : 0,
            "; drop gradients on all ranks or on none");
      }
    }
  }
}

void Engine::open_gradients(FlatParameter& flat, bool only_help, bool on_cpu) {
  if (!flat.requires_grad || std::none_of(flat.members.begin(), flat.members.end(), has_gradient)) {
    return;
  }
  const auto options = at::TensorOptions(flat.grad_dtype).device(flat.device);
  const auto mine = at::zeros({flat.shard_numel}, options);
  for (const auto& member : flat.members) {
    if (has_gradient(member)) {
      mine.narrow(0, member.leaf.storage_offset(), member.leaf.numel()).copy_(member.leaf.grad());
    }
  }
  const auto whole = at::empty({flat.padded_numel}, options);
  const auto work = flat.unit->group->all_gather(whole, mine, flat.unit->name);
  work->wait();
  work->release();
  if (only_help) {
    return;
  }
  flat.full_grad = on_cpu ? whole.cpu() : whole;
  for (auto& member : flat.members) {
    if (has_gradient(member)) {
      member.parameter.mutable_grad() = member.in_shape(flat.full_grad);
    }
  }
}

void Engine::close_gradients(FlatParameter& flat, bool writeback) {
  if (!std::exchange(flat.full_grad, at::Tensor()).defined()) {
    return;
  }
  for (auto& member : flat.members) {
    const auto grad = std::exchange(member.parameter.mutable_grad(), member.sentinel);
    if (!writeback || !has_gradient(member) || grad.is_same(member.sentinel)) {
      continue; // the last: a backward inside the scope has added to the shards already
    }
    if (grad.defined()) {
      const auto length = member.slice_end - member.slice_begin;
      member.leaf.mutable_grad().copy_(member.in_memory_order(grad).narrow(0, member.slice_begin, length));
    } else {
      member.leaf.mutable_grad() = at::Tensor();
    }
  }
}

} // namespace ebb::shard
