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
      full_scopes_ > 0 && !changes_storage, "[", op, "] ", describe(flat, written),
      changes_storage
          ? " is sharded and cannot be given other storage or another size; copy values into it with copy_() inside "
            "a ShardedModel::full_parameters() scope"
          : " is sharded and was written to outside a ShardedModel::full_parameters() scope; open one (changes "
            "then go to the shards), or, for an optimizer, build it on the ShardedModel's parameters()");
}

void Engine::before_shard_write(FlatParameter& flat) {
  const std::lock_guard lock(mutex_);
  if (OwnAccess::active() || options_.strategy == Strategy::kNoShard) {
    return;
  }
  Unit& unit = *flat.unit;
  TORCH_CHECK_VALUE(
      full_scopes_ == 0, "[fully_shard] a shard of unit '", unit.name,
      "' was written to (by an optimizer step?) inside a full_parameters() scope, whose end would undo it; step after "
      "the scope");
  resident_.release_gathers();
  // The gathered copy is out of date now.
  if (unit.pins == 0 && unit.residence != Residence::kSharded) {
    resident_.reshard(unit);
    if (current_ == &unit) {
      current_ = nullptr;
    }
  }
}

std::string Engine::describe(const FlatParameter& flat, const at::Tensor& view) const {
  const Member* member = flat.member_at(view.storage_offset());
  return c10::str("'", member ? member->name : std::string("?"), "' (unit '", flat.unit->name, "')");
}

// All ranks must start the same collectives in the same order. Here they compare notes before each.
void Engine::check_same_order(std::string_view what, const Unit& unit) {
  if (!options_.check_order || group_->size() == 1) {
    return;
  }
  const auto mine = std::string(what) + " of unit '" + unit.name + "'";
  const auto all = group_->exchange(mine);
  for (int rank = 1; rank < group_->size(); ++rank) {
    if (all[rank] != all[0]) {
      EBB_THROW(
          IncompatibleStateError, "[fully_shard] ranks use units in different orders: rank 0 starts the ", all[0],
          ", rank ", rank, " the ", all[rank],
          "; all ranks must run the same modules in the same order (a branch on rank or on local data?)");
    }
  }
}

} // namespace ebb::shard
