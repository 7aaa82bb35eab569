#include "engine.h"
#include "gradients.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

namespace ebb::shard {
namespace {

// Hooks are owned by the model's parameters, which may outlive the engine: they go through the owner block.
struct AfterGradient final : torch::autograd::PostAccumulateGradHook {
  AfterGradient(std::shared_ptr<PageOwner> owner, std::size_t member) : owner(std::move(owner)), member(member) {}
  void operator()(const at::Tensor& /*parameter*/) override {
    if (auto* engine = owner->engine.load(std::memory_order_acquire)) {
      engine->on_gradient(*owner->flat->unit, *owner->flat, owner->flat->members[member]);
    }
  }
  std::shared_ptr<PageOwner> owner;
  std::size_t member;
};

} // namespace

void attach_gradient_hooks(FlatParameter& flat) {
  if (!flat.requires_grad) {
    return;
  }
  for (std::size_t i = 0; i < flat.members.size(); ++i) {
    auto& parameter = flat.members[i].parameter;
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<AfterGradient>(flat.owner, i));
    // Runs before the gradient is accumulated: see Note [Sentinel gradients].
    parameter.register_hook([owner = flat.owner, i](at::Tensor grad) {
      if (owner->engine.load(std::memory_order_acquire)) {
        TORCH_CHECK_NOT_IMPLEMENTED(
            !at::GradMode::is_enabled(), "[fully_shard] backward(create_graph) through '", owner->flat->members[i].name,
            "' (unit '", owner->unit_name,
            "'): its gradient is averaged outside autograd and has no graph; leave create_graph out, or take "
            "autograd::grad() of the inputs, whose graph may use sharded parameters");
        owner->flat->members[i].parameter.mutable_grad() = at::Tensor();
      }
      return grad;
    });
  }
}

} // namespace ebb::shard
