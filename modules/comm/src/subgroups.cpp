#include "subgroups.h"

#include "connect_group.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>

namespace ebb::comm {

std::shared_ptr<Communicator> Subgroups::split(
    const c10::intrusive_ptr<c10d::Store>& store, int own_rank, const std::vector<int>& ranks, const std::string& name,
    const GroupOptions& options) {
  const auto self = std::find(ranks.begin(), ranks.end(), own_rank);
  TORCH_INTERNAL_ASSERT(self != ranks.end(), "split: rank ", own_rank, " is not in group ", name);
  int times = 0;
  {
    const std::lock_guard lock(mutex_);
    times = splits_[name]++;
  }
  const auto prefix = "split/" + name + "/" + std::to_string(times);
  auto group = ranks.size() == 1 ? single_group()
                                 : connect_group(
                                       c10::make_intrusive<c10d::PrefixStore>(prefix, store),
                                       static_cast<int>(self - ranks.begin()), static_cast<int>(ranks.size()), options);
  const std::lock_guard lock(mutex_);
  groups_.push_back(group);
  return group;
}

void Subgroups::abort() noexcept {
  std::vector<std::weak_ptr<Communicator>> groups;
  {
    const std::lock_guard lock(mutex_);
    groups = groups_;
  }
  for (const auto& group : groups) {
    if (const auto alive = group.lock()) {
      alive->abort();
    }
  }
}

} // namespace ebb::comm
