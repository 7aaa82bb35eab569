#include "engine.h"
#include "gradients.h"

#include <torch/torch.h>

#include <algorithm>

namespace ebb::shard {

std::vector<int> Engine::find_units(std::string_view function, const std::vector<std::string>& names) const {
  std::vector<int> found;
  for (const auto& name : names) {
    const auto unit = std::find_if(units_.begin(), units_.end(), [&](const auto& unit) { return unit->name == name; });
    if (unit != units_.end()) {
      found.push_back((*unit)->index);
      continue;
    }
    std::string known;
    for (const auto& other : units_) {
      known += (known.empty() ? "'" : ", '") + other->name + "'";
    }
    TORCH_CHECK_VALUE(false, "[", function, "] expected names of units, got '", name, "'; the units are ", known);
  }
  return found;
}

void Engine::unshard(const std::vector<int>& units) {
  await_optimizer();
  const std::lock_guard lock(mutex_);
  drop_failed_backward();
  for (const int index : units) {
    Unit& unit = *units_[index];
    if (unit.residence == Residence::kSharded) {
      resident_.gather_kept(unit);
    }
    unit.held = !unit.in_place;
  }
}

void Engine::wait_unsharded(const std::vector<int>& units) {
  const std::lock_guard lock(mutex_);
  for (const int index : units) {
    if (units_[index]->residence == Residence::kGathering) {
      resident_.finish_gather(*units_[index]);
    }
  }
}

void Engine::reshard(const std::vector<int>& units) {
  const std::lock_guard lock(mutex_);
  for (const int index : units) {
    Unit& unit = *units_[index];
    TORCH_CHECK_VALUE(
        unit.pins == 0, "[reshard] unit '", unit.name, "' is in use by a running operator; reshard it after that");
    TORCH_CHECK_VALUE(
        !unit.in_scope, "[reshard] unit '", unit.name, "' is whole inside a full_parameters() scope; close it first");
    if (unit.frame) {
      resident_.reshard(unit);
      if (current_ == &unit) {
        current_ = nullptr;
      }
    }
  }
}

void Engine::set_reshard_after_forward(const std::vector<int>& units, bool reshard) {
  const std::lock_guard lock(mutex_);
  for (const int index : units) {
    units_[index]->reshard_after_forward = reshard;
  }
}

void Engine::set_reshard_after_backward(const std::vector<int>& units, bool reshard) {
  const std::lock_guard lock(mutex_);
  for (const int index : units) {
    units_[index]->reshard_after_backward = reshard;
  }
}

void Engine::set_prefetch(int unit, Pass pass, std::vector<int> next) {
  const std::lock_guard lock(mutex_);
  (pass == Pass::kBackward ? units_[unit]->backward_prefetch : units_[unit]->forward_prefetch) = std::move(next);
}

void Engine::set_sync(const std::vector<int>& units, bool sync) {
  const std::lock_guard lock(mutex_);
  for (const int index : units) {
    units_[index]->sync = sync;
  }
}

void Engine::set_optimizer_in_backward(std::function<void(const std::string& name, at::Tensor& leaf)> function) {
  const std::lock_guard lock(mutex_);
  optimizer_in_backward_ = std::move(function);
}

void Engine::drop_unsynced() {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_VALUE(
      !unfinished_,
      "[zero_grad] a backward has not been finalized, whose gradients would come back; call "
      "finalize_backward() first, or reset() to forget it");
  if (!armed_) {
    reducer_->drop_postponed();
  }
  forget_unsynced();
}

void Engine::forget_unsynced() {
  for (auto& unit : units_) {
    for (auto& flat : unit->flats) {
      flat->unsynced = at::Tensor();
      flat->partial = at::Tensor();
      flat->collected = false;
      for (auto& member : flat->members) {
        member.unsynced = false;
      }
    }
  }
}

void Engine::enter_no_sync() {
  const std::lock_guard lock(mutex_);
  ++no_sync_scopes_;
}

void Engine::leave_no_sync() {
  const std::lock_guard lock(mutex_);
  --no_sync_scopes_;
}

} // namespace ebb::shard
