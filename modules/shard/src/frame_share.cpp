#include "ebb/shard/fully_shard.h"
#include "engine.h"

#include <torch/torch.h>

#include <algorithm>
#include <mutex>

namespace ebb::shard {

void ResidentSet::refit_frames() {
  int capacity = 0;
  std::int64_t largest = 0;
  for (const auto* set : share_->sets) {
    capacity = std::max(capacity, set->engine_.options().frames + set->engine_.options().prefetch);
    for (const auto& unit : set->engine_.units()) {
      largest = std::max(largest, unit->bytes);
    }
  }
  share_->pool.refit(capacity, largest);
}

void ResidentSet::join(const std::shared_ptr<FrameShare>& share) {
  if (share == share_) {
    return;
  }
  leave_share();
  share_ = share;
  share_->sets.push_back(this);
  refit_frames();
}

void ResidentSet::leave_share() {
  for (const auto& unit : engine_.units()) {
    if (unit->frame && !unit->frame->extra) {
      if (unit->residence == Residence::kGathering) {
        share_->pool.lose(*unit->frame); // the transport may still be writing into it
      } else {
        mark_quietly(*unit);
      }
      share_->pool.give_back(std::move(*unit->frame));
      unit->frame.reset();
    }
  }
  std::erase(share_->sets, this);
}

// The other model's gathers come after all that this one has read. Called by destructors as well.
void ResidentSet::mark_quietly(Unit& unit) noexcept {
  try {
    engine_.streams_.record(unit.frame->used);
  } catch (const std::exception&) {
    share_->pool.lose(*unit.frame); // a device that takes no more orders
  }
}

bool ResidentSet::take_from_others() {
  return std::any_of(
      share_->sets.begin(), share_->sets.end(), [this](ResidentSet* set) { return set != this && set->give_up_one(); });
}

bool ResidentSet::give_up_one() {
  // Models that share frames run in turns; one that a second thread uses all the same is left alone.
  const std::unique_lock lock(engine_.mutex_, std::try_to_lock);
  Unit* given = lock ? victim(nullptr, -1) : nullptr;
  if (!given) {
    return false;
  }
  ++engine_.stats_.evictions;
  reshard(*given);
  if (engine_.current_ == given) {
    engine_.current_ = nullptr;
  }
  return true;
}

void Engine::share_frames_with(Engine& other) {
  const std::scoped_lock lock(mutex_, other.mutex_);
  for (const auto* engine : {this, &other}) {
    TORCH_CHECK_VALUE(
        !engine->armed_ && engine->full_scopes_ == 0,
        "[share_frames] expected models between steps, got one in a backward or in a full_parameters() scope; end that "
        "first");
  }
  const auto device = units_.front()->flats.front()->device;
  const auto other_device = other.units_.front()->flats.front()->device;
  TORCH_CHECK_VALUE(
      device == other_device, "[share_frames] expected models on one device, got ", device, " and ", other_device);
  for (auto* engine : {this, &other}) {
    engine->reshard_all();
  }
  resident_.join(other.resident_.share());
}

void share_frames(const std::vector<ShardedModel>& models) {
  for (std::size_t i = 1; i < models.size(); ++i) {
    models[i].engine().share_frames_with(models[0].engine());
  }
}

} // namespace ebb::shard
