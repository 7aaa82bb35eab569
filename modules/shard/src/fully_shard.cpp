#include "ebb/shard/fully_shard.h"

#include "dispatch.h"
#include "ebb/base/error.h"
#include "ebb/base/log.h"
#include "engine.h"
#include "module_tree.h"
#include "sync.h"

#include <torch/csrc/jit/passes/tensorexpr_fuser.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <map>

namespace ebb::shard {
namespace {

// One unit from its plan: its parameters grouped by dtype and by whether they train, one flat parameter each.
std::unique_ptr<Unit> make_unit(const UnitPlan& plan, int index, int rank, int world_size) {
  auto unit = std::make_unique<Unit>();
  unit->index = index;
  unit->name = plan.name;
  const auto device = plan.parameters.front().tensor.device();
  for (const bool trains : {true, false}) {
    std::map<c10::ScalarType, std::unique_ptr<FlatParameter>> by_dtype;
    for (const auto& parameter : plan.parameters) {
      TORCH_CHECK_VALUE(
          parameter.tensor.device() == device, "[fully_shard] expected all parameters of unit '", plan.name,
          "' on one device, got '", plan.parameters.front().names.front(), "' on ", device, " and '",
          parameter.names.front(), "' on ", parameter.tensor.device(), "; move the model to one device first");
      if (parameter.tensor.requires_grad() != trains) {
        continue;
      }
      auto& flat = by_dtype[parameter.tensor.scalar_type()];
      if (!flat) {
        flat = std::make_unique<FlatParameter>();
        flat->unit = unit.get();
        flat->dtype = parameter.tensor.scalar_type();
        flat->device = device;
        flat->requires_grad = trains;
      }
      Member member;
      member.name = parameter.names.front();
      member.tied_names.assign(parameter.names.begin() + 1, parameter.names.end());
      member.parameter = parameter.tensor;
      member.sizes = parameter.tensor.sizes().vec();
      member.numel = parameter.tensor.numel();
      flat->members.push_back(std::move(member));
    }
    for (auto& [dtype, flat] : by_dtype) {
      flat->lay_out(rank, world_size);
      flat->frame_offset = unit->bytes;
      unit->bytes += (flat->padded_bytes() + 63) / 64 * 64;
      unit->flats.push_back(std::move(flat));
    }
  }
  return unit;
}

std::string settings_of(const ShardOptions& options) {
  return c10::str(
      "strategy ", name_of(options.strategy), ", frames ", options.frames, ", prefetch ", options.prefetch,
      ", sync_module_states ", options.sync_module_states, ", check_order ", options.check_order);
}

template <class Model>
ShardedModel shard(Model& model, ShardOptions options) {
  TORCH_CHECK_VALUE(options.frames >= 1, "[fully_shard] expected at least 1 frame, got ", options.frames);
  TORCH_CHECK_VALUE(options.prefetch >= 0, "[fully_shard] expected prefetch >= 0, got ", options.prefetch);
  const auto tree = ModuleTree::of(model);
  const auto group = options.mesh.axis("shard");
  for (const auto& node : tree.nodes) {
    for (const auto& [name, tensor] : node.parameters) {
      TORCH_CHECK_VALUE(
          !tensor.key_set().has(kPagedKey), "[fully_shard] '", name,
          "' is sharded already; call fully_shard() once, on the outermost module, with a wrap policy "
          "for the parts");
    }
  }
  check_same_model(tree, settings_of(options), *group);
  const auto plans = plan_units(tree, options.wrap);
  TORCH_CHECK_VALUE(
      !plans.empty(),
      "[fully_shard] expected a model with parameters, got none; register them with register_parameter()");
  if (options.sync_module_states) {
    broadcast_from_rank0(tree, *options.mesh.world());
  }
  install_fallback();
  if (tree.script && plans.front().parameters.front().tensor.device().type() != c10::kCPU) {
    // The fuser reads parameters by pointer, past the dispatcher.
    torch::jit::setTensorExprFuserEnabled(false);
  }
  const bool whole = options.strategy == Strategy::kNoShard;
  std::vector<std::unique_ptr<Unit>> units;
  for (const auto& plan : plans) {
    units.push_back(
        make_unit(plan, static_cast<int>(units.size()), whole ? 0 : group->rank(), whole ? 1 : group->size()));
  }
  auto engine = std::make_shared<Engine>(std::move(options), std::move(units));
  engine->take_over();
  ShardedModel sharded(std::move(engine));
  log::debug("{}", sharded.explain());
  return sharded;
}

} // namespace

std::string_view name_of(Strategy strategy) {
  switch (strategy) {
    case Strategy::kFullShard:
      return "full_shard";
    case Strategy::kShardGradOp:
      return "shard_grad_op";
    case Strategy::kNoShard:
      return "no_shard";
  }
  return "?";
}

ShardedModel fully_shard(torch::nn::Module& model, ShardOptions options) {
  return shard(model, std::move(options));
}

ShardedModel fully_shard(torch::jit::Module& model, ShardOptions options) {
  return shard(model, std::move(options));
}

} // namespace ebb::shard
