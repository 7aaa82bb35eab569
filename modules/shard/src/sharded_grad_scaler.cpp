#include "ebb/shard/sharded_grad_scaler.h"

#include "sync.h"

#include <torch/torch.h>

#include <cmath>
#include <map>
#include <vector>

namespace ebb::shard {

ShardedGradScaler::ShardedGradScaler(std::shared_ptr<comm::Communicator> group, const GradScalerOptions& options)
    : group_(std::move(group)), options_(options), state_{options.init_scale, 0} {
  TORCH_CHECK_VALUE(group_, "[ShardedGradScaler] expected the group of the model's ranks, got none; pass mesh.world()");
  TORCH_CHECK_VALUE(
      options.init_scale > 0 && std::isfinite(options.init_scale), "[ShardedGradScaler] expected init_scale > 0, got ",
      options.init_scale);
  TORCH_CHECK_VALUE(
      options.growth_factor > 1, "[ShardedGradScaler] expected growth_factor > 1, got ", options.growth_factor);
  TORCH_CHECK_VALUE(
      options.backoff_factor > 0 && options.backoff_factor < 1,
      "[ShardedGradScaler] expected backoff_factor in (0, 1), got ", options.backoff_factor);
  TORCH_CHECK_VALUE(
      options.growth_interval >= 1, "[ShardedGradScaler] expected growth_interval >= 1, got ", options.growth_interval);
}

at::Tensor ShardedGradScaler::scale(const at::Tensor& loss) const {
  if (!options_.enabled) {
    return loss;
  }
  // float16 ends at 65504, below the first scale.
  return (loss.scalar_type() == at::kHalf ? loss.to(at::kFloat) : loss) * state_.scale;
}

void ShardedGradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) {
    return;
  }
  TORCH_CHECK_VALUE(
      !seen_.contains(&optimizer),
      "[ShardedGradScaler::unscale_] this optimizer's gradients were unscaled or stepped already since the last "
      "update(); call unscale_() once a step, before step(), and update() after it");
  const at::NoGradGuard no_grad;
  std::map<std::pair<std::string, at::ScalarType>, std::vector<at::Tensor>> grads;
  auto device = at::Device(at::kCPU);
  for (const auto& param_group : optimizer.param_groups()) {
    for (const auto& parameter : param_group.params()) {
      device = parameter.device();
      if (parameter.grad().defined() && parameter.grad().numel() > 0) {
        grads[{device.str(), parameter.grad().scalar_type()}].push_back(parameter.grad());
      }
    }
  }
  auto found_inf = at::zeros({1}, at::TensorOptions().dtype(at::kFloat).device(device));
  const auto inv_scale = at::full({1}, 1.0 / state_.scale, found_inf.options());
  for (auto& [key, list] : grads) {
    auto on_device = found_inf.to(list.front().device());
    at::_amp_foreach_non_finite_check_and_unscale_(list, on_device, inv_scale.to(list.front().device()));
    found_inf = at::maximum(found_inf, on_device.to(device));
  }
  if (group_->size() > 1) {
    all_reduce_small(*group_, found_inf, comm::ReduceOp::kMax, "(gradient overflow)");
  }
  seen_[&optimizer] = {Stage::kUnscaled, found_inf.item<float>() > 0};
}

bool ShardedGradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) {
    optimizer.step();
    return true;
  }
  if (!seen_.contains(&optimizer)) {
    unscale_(optimizer);
  }
  auto& seen = seen_.at(&optimizer);
  TORCH_CHECK_VALUE(
      seen.stage == Stage::kUnscaled,
      "[ShardedGradScaler::step] this optimizer has stepped already since the last update(); call update() after each "
      "step");
  seen.stage = Stage::kStepped;
  if (!seen.found_inf) {
    optimizer.step();
  }
  return !seen.found_inf;
}

void ShardedGradScaler::update(std::optional<double> new_scale) {
  if (!options_.enabled) {
    return;
  }
  if (new_scale) {
    TORCH_CHECK_VALUE(
        *new_scale > 0 && std::isfinite(*new_scale), "[ShardedGradScaler::update] expected a scale > 0, got ",
        *new_scale);
    state_.scale = *new_scale;
    seen_.clear();
    return;
  }
  TORCH_CHECK_VALUE(
      !seen_.empty(), "[ShardedGradScaler::update] no optimizer was unscaled or stepped since the last update()");
  bool found_inf = false;
  for (const auto& [optimizer, seen] : seen_) {
    found_inf = found_inf || seen.found_inf;
  }
  seen_.clear();
  if (found_inf) {
    state_ = {state_.scale * options_.backoff_factor, 0};
    return;
  }
  if (++state_.growth_tracker == options_.growth_interval) {
    const auto grown = state_.scale * options_.growth_factor;
    state_ = {std::isfinite(static_cast<float>(grown)) ? grown : state_.scale, 0};
  }
}

void ShardedGradScaler::load_state(const GradScalerState& state) {
  TORCH_CHECK_VALUE(
      state.scale > 0 && std::isfinite(state.scale) && state.growth_tracker >= 0,
      "[ShardedGradScaler::load_state] expected scale > 0 and growth_tracker >= 0, got ", state.scale, " and ",
      state.growth_tracker);
  state_ = state;
  seen_.clear();
}

} // namespace ebb::shard
