#include "ebb/shard/join.h"

#include <torch/torch.h>

namespace ebb::shard {

Join::Join(std::shared_ptr<comm::Communicator> group, bool divide_by_active)
    : group_(std::move(group)), divide_by_active_(divide_by_active) {
  TORCH_CHECK_VALUE(group_, "[Join] expected the group of the ranks that train together, got none; pass mesh.world()");
}

bool Join::step(bool has_batch) {
  auto count = at::full({1}, has_batch ? 1.0 : 0.0, at::kDouble);
  if (group_->size() > 1) {
    group_->all_reduce(count, comm::ReduceOp::kSum, 1, "(ranks that have a batch)")->wait();
  }
  active_ = has_batch;
  num_active_ = static_cast<int>(count.item<double>());
  TORCH_CHECK_VALUE(
      has_batch || !first_ || num_active_ == 0, "[Join::step] rank ", group_->rank(),
      " has no batch at the first step, and so none to repeat; give every rank at least one");
  first_ = false;
  return num_active_ > 0;
}

at::Tensor Join::weighted(const at::Tensor& loss) const {
  if (!active_) {
    return loss * 0;
  }
  return divide_by_active_ && num_active_ < group_->size() ? loss * (static_cast<double>(group_->size()) / num_active_)
                                                           : loss;
}

} // namespace ebb::shard
