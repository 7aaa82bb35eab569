#include "shard_stage.h"

#include "ebb/base/error.h"
#include "ebb/base/log.h"
#include "unit.h"

#include <torch/torch.h>

#include <unordered_set>
#include <utility>

namespace ebb::shard {

bool ShardStage::fetch(const Unit& unit) {
  return streams_.run(Lane::kGather, [&] {
    bool began = false;
    for (const auto& flat : unit.flats) {
      if (staged_.contains(flat.get())) {
        continue;
      }
      auto shard = at::empty({flat->shard_numel}, flat->shard.options().device(flat->device));
      bytes_ += static_cast<std::int64_t>(shard.nbytes());
      auto copy = tier_->fetch(shard, flat->shard);
      staged_.emplace(flat.get(), Staged{std::move(shard), std::move(copy)});
      began = true;
    }
    return began;
  });
}

at::Tensor ShardStage::take(const FlatParameter& flat) {
  if (!tier_) {
    return flat.shard;
  }
  fetch(*flat.unit);
  auto staged = std::move(staged_.at(&flat));
  staged_.erase(&flat);
  bytes_ -= static_cast<std::int64_t>(staged.shard.nbytes());
  streams_.run(Lane::kGather, [&] { staged.copy->wait(); });
  taken_[&flat] = std::move(staged.copy);
  return staged.shard;
}

void ShardStage::drop(const Unit& unit) {
  for (const auto& flat : unit.flats) {
    drop(*flat);
  }
}

void ShardStage::drop(const FlatParameter& flat) {
  taken_.erase(&flat); // its end waits on the host
  if (const auto found = staged_.find(&flat); found != staged_.end()) {
    streams_.run(Lane::kGather, [&] {
      const auto staged = std::move(found->second);
      staged_.erase(found);
      bytes_ -= static_cast<std::int64_t>(staged.shard.nbytes());
      staged.copy->wait();
    });
  }
}

void ShardStage::drop_all() {
  taken_.clear();
  while (!staged_.empty()) {
    drop(*staged_.begin()->first);
  }
}

void ShardStage::abandon() noexcept {
  try {
    drop_all();
    finish_stores();
  } catch (const std::exception& error) {
    log::debug("a copy of the failed step failed as well: {}", message_of(error));
  }
  staged_.clear();
  stores_.clear();
  bytes_ = 0;
}

int ShardStage::units() const {
  std::unordered_set<const Unit*> units;
  for (const auto& [flat, staged] : staged_) {
    units.insert(flat->unit);
  }
  return static_cast<int>(units.size());
}

void ShardStage::store(const at::Tensor& to, const at::Tensor& from) {
  stores_.push_back(tier_->store(to, from));
}

void ShardStage::finish_stores() {
  for (const auto& store : std::exchange(stores_, {})) {
    store->wait();
  }
}

} // namespace ebb::shard
