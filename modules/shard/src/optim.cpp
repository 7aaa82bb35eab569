#include "ebb/shard/optim.h"

#include <torch/torch.h>

#include <map>
#include <tuple>

namespace ebb::shard {
namespace {

using torch::optim::OptimizerParamGroup;

at::Tensor run_closure(const torch::optim::Optimizer::LossClosure& closure) {
  if (!closure) {
    return {};
  }
  const at::AutoGradMode grad(true);
  return closure();
}

template <class ParamState, class Map>
ParamState& state_of(Map& states, const at::Tensor& parameter) {
  auto& state = states[parameter.unsafeGetTensorImpl()];
  if (!state) {
    state = std::make_unique<ParamState>();
  }
  return static_cast<ParamState&>(*state);
}

// What one call of a fused kernel takes: tensors of one dtype and device.
struct Batch {
  std::vector<at::Tensor> parameters, grads, first, second, largest, steps;
};
using Key = std::tuple<c10::ScalarType, c10::Device, bool>;
struct KeyLess {
  static auto order(const Key& key) {
    return std::make_tuple(
        static_cast<int>(std::get<0>(key)), static_cast<int>(std::get<1>(key).type()), std::get<1>(key).index(),
        std::get<2>(key));
  }
  bool operator()(const Key& a, const Key& b) const {
    return order(a) < order(b);
  }
};
using Batches = std::map<Key, Batch, KeyLess>;

const at::Tensor* gradient_of(const at::Tensor& parameter) {
  const auto& grad = parameter.grad();
  if (!grad.defined() || parameter.numel() == 0) {
    return nullptr;
  }
  TORCH_CHECK_VALUE(
      !grad.is_sparse(),
      "[fused optimizer] expected dense gradients, got a sparse one; use torch::optim::SparseAdam's kin unsharded");
  return &grad;
}

class FusedAdamW final : public torch::optim::AdamW {
 public:
  using AdamW::AdamW;

  at::Tensor step(LossClosure closure) override {
    auto loss = run_closure(closure);
    const at::NoGradGuard no_grad;
    for (auto& group : param_groups_) {
      step_group(group);
    }
    return loss;
  }

 private:
  void step_group(OptimizerParamGroup& group) {
    const auto& options = static_cast<const torch::optim::AdamWOptions&>(group.options());
    Batches batches;
    std::map<std::int64_t, at::Tensor> step_tensors; // most parameters share their step
    for (auto& parameter : group.params()) {
      const auto* grad = gradient_of(parameter);
      if (!grad) {
        continue;
      }
      auto& state = state_of<torch::optim::AdamWParamState>(state_, parameter);
      if (!state.exp_avg().defined()) {
        state.step(0);
        state.exp_avg(at::zeros_like(parameter, at::MemoryFormat::Preserve));
        state.exp_avg_sq(at::zeros_like(parameter, at::MemoryFormat::Preserve));
        if (options.amsgrad()) {
          state.max_exp_avg_sq(at::zeros_like(parameter, at::MemoryFormat::Preserve));
        }
      }
      state.step(state.step() + 1);
      auto& step = step_tensors[state.step()];
      if (!step.defined()) {
        step = at::full(
            {}, static_cast<double>(state.step()), at::TensorOptions().dtype(at::kFloat).device(parameter.device()));
      }
      auto& batch = batches[{parameter.scalar_type(), parameter.device(), false}];
      batch.parameters.push_back(parameter);
      batch.grads.push_back(*grad);
      batch.first.push_back(state.exp_avg());
      batch.second.push_back(state.exp_avg_sq());
      if (options.amsgrad()) {
        batch.largest.push_back(state.max_exp_avg_sq());
      }
      batch.steps.push_back(step);
    }
    const auto [beta1, beta2] = options.betas();
    for (auto& [key, batch] : batches) {
      at::_fused_adamw_(
          batch.parameters, batch.grads, batch.first, batch.second, batch.largest, batch.steps, options.lr(), beta1,
          beta2, options.weight_decay(), options.eps(), options.amsgrad(), /*maximize=*/false);
    }
  }
};

class FusedSgd final : public torch::optim::SGD {
 public:
  using SGD::SGD;

  at::Tensor step(LossClosure closure) override {
    auto loss = run_closure(closure);
    const at::NoGradGuard no_grad;
    for (auto& group : param_groups_) {
      step_group(group);
    }
    return loss;
  }

 private:
  void step_group(OptimizerParamGroup& group) {
    const auto& options = static_cast<const torch::optim::SGDOptions&>(group.options());
    Batches batches;
    for (auto& parameter : group.params()) {
      const auto* grad = gradient_of(parameter);
      if (!grad) {
        continue;
      }
      bool first_step = false;
      at::Tensor momentum;
      if (options.momentum() != 0) {
        auto& state = state_of<torch::optim::SGDParamState>(state_, parameter);
        if (!state.momentum_buffer().defined()) {
          first_step = true;
          state.momentum_buffer(at::empty_like(parameter));
        }
        momentum = state.momentum_buffer();
      }
      auto& batch = batches[{parameter.scalar_type(), parameter.device(), first_step}];
      batch.parameters.push_back(parameter);
      batch.grads.push_back(*grad);
      if (momentum.defined()) {
        batch.first.push_back(momentum);
      }
    }
    for (auto& [key, batch] : batches) {
      at::_fused_sgd_(
          batch.parameters, batch.grads, batch.first, options.weight_decay(), options.momentum(), options.lr(),
          options.dampening(), options.nesterov(), /*maximize=*/false, /*is_first_step=*/std::get<2>(key));
    }
  }
};

} // namespace

std::unique_ptr<torch::optim::Optimizer> fused_adamw(
    std::vector<at::Tensor> parameters, const torch::optim::AdamWOptions& options) {
  return std::make_unique<FusedAdamW>(std::move(parameters), options);
}
std::unique_ptr<torch::optim::Optimizer> fused_adamw(
    std::vector<OptimizerParamGroup> groups, const torch::optim::AdamWOptions& defaults) {
  return std::make_unique<FusedAdamW>(std::move(groups), defaults);
}
std::unique_ptr<torch::optim::Optimizer> fused_sgd(
    std::vector<at::Tensor> parameters, const torch::optim::SGDOptions& options) {
  return std::make_unique<FusedSgd>(std::move(parameters), options);
}
std::unique_ptr<torch::optim::Optimizer> fused_sgd(
    std::vector<OptimizerParamGroup> groups, const torch::optim::SGDOptions& defaults) {
  return std::make_unique<FusedSgd>(std::move(groups), defaults);
}

} // namespace ebb::shard
