#include "make_units.h"

#include "ebb/comm/init.h"

#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

namespace ebb::shard {
namespace {

bool is_zero2(Strategy strategy) {
  return strategy == Strategy::kShardGradOp || strategy == Strategy::kHybridShardZero2;
}

// What this unit does, from the options of all and its own. Collective where an integer reshard_after_forward needs a
// group.
void settle(Unit& unit, const UnitPlan& plan, const ShardOptions& options) {
  const auto own = options.unit_options ? options.unit_options(plan.info) : UnitOptions{};
  unit.whole = !own.shard.value_or(options.strategy != Strategy::kNoShard);
  unit.group = unit.whole ? comm::single() : options.mesh.axis("shard");
  const auto reshard = own.reshard_after_forward.value_or(!is_zero2(options.strategy));
  unit.reshard_after_forward = true;
  if (const auto* yes = std::get_if<bool>(&reshard)) {
    unit.reshard_after_forward = *yes;
    return;
  }
  const int ranks = std::get<int>(reshard);
  const int size = unit.group->size();
  TORCH_CHECK_VALUE(
      ranks >= 1 && size % ranks == 0, "[fully_shard] expected reshard_after_forward of unit '", unit.name,
      "' to divide the ", size, " ranks of the shard axis, got ", ranks);
  if (ranks == 1) {
    unit.reshard_after_forward = false;
  } else if (ranks < size) {
    unit.near_group = options.mesh.shard_neighbours(ranks);
  }
}

} // namespace

bool can_compute_in(c10::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kDouble;
}

std::unique_ptr<Unit> make_unit(
    const UnitPlan& plan, int index, const ShardOptions& options, const std::shared_ptr<Tier>& tier) {
  auto unit = std::make_unique<Unit>();
  unit->index = index;
  unit->name = plan.name;
  settle(*unit, plan, options);
  const auto& mixed = options.mixed_precision;
  const auto device = options.device.value_or(plan.parameters.front().tensor.device());
  for (const bool trains : {true, false}) {
    std::map<std::tuple<c10::ScalarType, bool, c10::ScalarType>, std::unique_ptr<FlatParameter>> by_dtype;
    for (const auto& parameter : plan.parameters) {
      TORCH_CHECK_VALUE(
          options.device || parameter.tensor.device() == device, "[fully_shard] expected all parameters of unit '",
          plan.name, "' on one device, got '", plan.parameters.front().names.front(), "' on ", device, " and '",
          parameter.names.front(), "' on ", parameter.tensor.device(),
          "; move the model to one device first, or name one as ShardOptions::device");
      if (parameter.tensor.requires_grad() != trains) {
        continue;
      }
      const auto master = parameter.tensor.scalar_type();
      const bool converts = c10::isFloatingType(master) && (parameter.compute_dtype || !parameter.keep_full);
      const auto dtype = parameter.compute_dtype.value_or(converts ? mixed.param_dtype.value_or(master) : master);
      auto& flat = by_dtype[{master, converts, dtype}];
      if (!flat) {
        flat = std::make_unique<FlatParameter>();
        flat->unit = unit.get();
        flat->master_dtype = master;
        flat->param_dtype = dtype;
        flat->dtype = dtype;
        flat->reduce_dtype = converts ? mixed.reduce_dtype.value_or(master) : master;
        flat->grad_dtype = mixed.keep_low_precision_grads ? flat->reduce_dtype : master;
        flat->device = device;
        flat->tier = tier;
        flat->requires_grad = trains;
      }
      Member member;
      member.name = parameter.names.front();
      member.tied_names.assign(parameter.names.begin() + 1, parameter.names.end());
      member.parameter = parameter.tensor;
      member.take_shape(parameter.tensor);
      flat->members.push_back(std::move(member));
    }
    for (auto& [key, flat] : by_dtype) {
      flat->lay_out(unit->group->rank(), unit->group->size());
      if (flat->requires_grad) {
        flat->reduce_offset = unit->reduce_bytes;
        unit->reduce_bytes += (flat->reduce_bytes() + 63) / 64 * 64;
      }
      unit->flats.push_back(std::move(flat));
    }
  }
  unit->place_in_frame();
  unit->in_place = unit->whole && !tier && std::none_of(unit->flats.begin(), unit->flats.end(), [](const auto& flat) {
                     return flat->is_mixed();
                   });
  return unit;
}

void override_dtypes(std::vector<UnitPlan>& plans, const MixedPrecision& mixed) {
  for (auto& plan : plans) {
    for (auto& parameter : plan.parameters) {
      if (!mixed.param_dtype_override_fn || !parameter.tensor.is_floating_point()) {
        continue;
      }
      const auto& name = parameter.names.front();
      parameter.compute_dtype = mixed.param_dtype_override_fn(name, parameter.tensor);
      TORCH_CHECK_VALUE(
          !parameter.compute_dtype || can_compute_in(*parameter.compute_dtype),
          "[fully_shard] expected param_dtype_override_fn to return float32, bfloat16, float16, float64 or nothing, "
          "got ",
          *parameter.compute_dtype, " for '", name, "'");
    }
  }
}

} // namespace ebb::shard
