#include "dispatch.h"
#include "ebb/base/error.h"
#include "ebb/base/log.h"
#include "engine.h"

#include <torch/torch.h>

namespace ebb::shard {

void Engine::check_write(const FlatParameter& flat, const at::Tensor& written, const std::string& op) const {
  const std::lock_guard lock(mutex_);
  const bool changes_storage = op == "aten::set_" || op == "aten::resize_" || op == "aten::resize_as_";
  TORCH_CHECK_VALUE(
      flat.unit->in_scope && !changes_storage, "[", op, "] ", describe(flat, written),
      changes_storage
          ? " is sharded and cannot be given other storage or another size; copy values into it with copy_() inside "
            "a ShardedModel::full_parameters() scope"
          : " is sharded and was written to outside a ShardedModel::full_parameters() scope of its unit; open one "
            "(changes then go to the shards), or, for an optimizer, build it on the ShardedModel's parameters()");
}

// Frozen parameters have no hooks, no gradient and no part in reductions: one that is unfrozen later would stay as it is.
void Engine::check_not_unfrozen(const Unit& unit) const {
  for (const auto& flat : unit.flats) {
    if (flat->requires_grad) {
      continue;
    }
    for (const auto& member : flat->members) {
      TORCH_CHECK_VALUE(
          !member.parameter.requires_grad() && !member.leaf.requires_grad(), "[fully_shard] '", member.name,
          "' (unit '", unit.name,
          "') was frozen when the model was sharded and requires a gradient now, which it would not get; set "
          "requires_grad before fully_shard()");
    }
  }
}

void Engine::before_shard_write(FlatParameter& flat) {
  const std::lock_guard lock(mutex_);
  Unit& unit = *flat.unit;
  unit.shard_written = true;
  if (OwnAccess::active() || unit.in_place) {
    return;
  }
  TORCH_CHECK_VALUE(
      !unit.in_scope, "[fully_shard] a shard of unit '", unit.name,
      "' was written to (by an optimizer step?) inside a full_parameters() scope, whose end would undo it; step after "
      "the scope");
  // The gathered copy is out of date now.
  if (unit.pins == 0 && unit.residence != Residence::kSharded) {
    resident_.reshard(unit);
    if (current_ == &unit) {
      current_ = nullptr;
    }
  }
  resident_.release_gathers(); // also of what was still being gathered
  resident_.drop_near_slice(unit);
  stage_.drop(unit);
}

std::string Engine::describe(const FlatParameter& flat, const at::Tensor& view) const {
  const Member* member = flat.member_at(view.storage_offset());
  return c10::str("'", member ? member->name : std::string("?"), "' (unit '", flat.unit->name, "')");
}

// All ranks must start the same collectives in the same order. Here they compare notes before each.
void Engine::check_same_order(std::string_view what, const Unit& unit) {
  auto& ranks = unit.whole ? world() : group();
  if (!options_.check_order || ranks.size() == 1) {
    return;
  }
  const auto mine = std::string(what) + " of unit '" + unit.name + "'";
  const auto all = ranks.exchange(mine);
  for (int rank = 1; rank < ranks.size(); ++rank) {
    if (all[rank] != all[0]) {
      EBB_THROW(
          IncompatibleStateError, "[fully_shard] ranks use units in different orders: rank 0 starts the ", all[0],
          ", rank ", rank, " the ", all[rank],
          "; all ranks must run the same modules in the same order (a branch on rank or on local data?)");
    }
  }
}

} // namespace ebb::shard
