#include "ebb/shard/fully_shard.h"

#include "dispatch.h"
#include "dry_mode.h"
#include "ebb/base/error.h"
#include "ebb/base/log.h"
#include "ebb/comm/init.h"
#include "ebb/shard/deferred_init.h"
#include "engine.h"
#include "module_tree.h"
#include "offload.h"
#include "recording.h"
#include "sync.h"

#include <torch/csrc/jit/passes/tensorexpr_fuser.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <map>
#include <unordered_map>

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

// One unit from its plan: its parameters grouped by dtype and by whether they train, one flat parameter each.
std::unique_ptr<Unit> make_unit(
    const UnitPlan& plan, int index, const ShardOptions& options, const std::shared_ptr<Tier>& tier) {
  auto unit = std::make_unique<Unit>();
  unit->index = index;
  unit->name = plan.name;
  settle(*unit, plan, options);
  const auto& mixed = options.mixed_precision;
  const auto device = plan.parameters.front().tensor.device();
  for (const bool trains : {true, false}) {
    std::map<std::pair<c10::ScalarType, bool>, std::unique_ptr<FlatParameter>> by_dtype;
    for (const auto& parameter : plan.parameters) {
      TORCH_CHECK_VALUE(
          parameter.tensor.device() == device, "[fully_shard] expected all parameters of unit '", plan.name,
          "' on one device, got '", plan.parameters.front().names.front(), "' on ", device, " and '",
          parameter.names.front(), "' on ", parameter.tensor.device(), "; move the model to one device first");
      if (parameter.tensor.requires_grad() != trains) {
        continue;
      }
      const auto master = parameter.tensor.scalar_type();
      const bool converts = c10::isFloatingType(master) && !parameter.keep_full;
      auto& flat = by_dtype[{master, converts}];
      if (!flat) {
        flat = std::make_unique<FlatParameter>();
        flat->unit = unit.get();
        flat->master_dtype = master;
        flat->dtype = converts ? mixed.param_dtype.value_or(master) : master;
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
      flat->frame_offset = unit->bytes;
      unit->bytes += (flat->padded_bytes() + 63) / 64 * 64;
      if (flat->requires_grad) {
        flat->reduce_offset = unit->reduce_bytes;
        unit->reduce_bytes += (flat->reduce_bytes() + 63) / 64 * 64;
      }
      unit->flats.push_back(std::move(flat));
    }
  }
  unit->in_place = unit->whole && !tier && std::none_of(unit->flats.begin(), unit->flats.end(), [](const auto& flat) {
                     return flat->is_mixed();
                   });
  return unit;
}

void convert_buffers(const ModuleTree& tree, const ShardOptions& options) {
  const auto& mixed = options.mixed_precision;
  if (!mixed.buffer_dtype) {
    return;
  }
  const auto ignored = covered_nodes(tree, options.ignored);
  for (std::size_t i = 0; i < tree.nodes.size(); ++i) {
    const auto& node = tree.nodes[i];
    const bool keeps = mixed.keep_full && mixed.keep_full({node.name, node.class_name, 0, 0, node.depth, node.module});
    if (keeps || ignored[i]) {
      continue;
    }
    for (auto [name, buffer] : node.buffers) {
      if (buffer.defined() && buffer.is_floating_point()) {
        buffer.set_data(buffer.to(*mixed.buffer_dtype));
      }
    }
  }
}

std::string dtypes_of(const MixedPrecision& mixed) {
  std::string text;
  for (const auto& dtype : {mixed.param_dtype, mixed.reduce_dtype, mixed.buffer_dtype, mixed.output_dtype}) {
    text += dtype ? c10::str(" ", *dtype) : std::string(" own");
  }
  return text + (mixed.keep_low_precision_grads ? " kept" : "") + (mixed.cast_forward_inputs ? "" : " as given");
}

std::string names_of(const std::vector<UnitPlan>& plans) {
  std::string text;
  for (const auto& plan : plans) {
    text += c10::str(" ", plan.name, " of ", plan.parameters.size());
  }
  return text;
}

void check_options(const ShardOptions& options) {
  TORCH_CHECK_VALUE(options.frames >= 1, "[fully_shard] expected at least 1 frame, got ", options.frames);
  TORCH_CHECK_VALUE(options.prefetch >= 0, "[fully_shard] expected prefetch >= 0, got ", options.prefetch);
  constexpr int kMostFrames = 1'000'000; // their number must fit an int
  TORCH_CHECK_VALUE(
      options.frames <= kMostFrames && options.prefetch <= kMostFrames, "[fully_shard] expected at most ", kMostFrames,
      " frames and prefetch, got ", options.frames, " and ", options.prefetch);
  const bool hybrid = options.strategy == Strategy::kHybridShard || options.strategy == Strategy::kHybridShardZero2;
  TORCH_CHECK_VALUE(
      !hybrid || options.mesh.has_axis("replicate"), "[fully_shard] ", name_of(options.strategy),
      " needs a mesh with the axes 'replicate' and 'shard', got one axis; make it with "
      "Mesh::replicate_by_shard(world, replicate, shard)");
  const auto factor = options.gradient_divide_factor.value_or(1);
  TORCH_CHECK_VALUE(
      factor > 0 && std::isfinite(factor), "[fully_shard] expected gradient_divide_factor > 0, got ", factor);
  for (const auto dtype :
       {options.mixed_precision.param_dtype, options.mixed_precision.reduce_dtype, options.mixed_precision.buffer_dtype,
        options.mixed_precision.output_dtype}) {
    TORCH_CHECK_VALUE(
        !dtype || *dtype == at::kFloat || *dtype == at::kBFloat16 || *dtype == at::kHalf || *dtype == at::kDouble,
        "[fully_shard] expected dtypes of mixed_precision among float32, bfloat16, float16 and float64, got ", *dtype);
  }
}

std::string settings_of(const ShardOptions& options) {
  return c10::str(
      "strategy ", name_of(options.strategy), ", frames ", options.frames, ", prefetch ", options.prefetch,
      ", sync_module_states ", options.sync_module_states, ", check_order ", options.check_order, ", divide factor ",
      options.gradient_divide_factor.value_or(0), ", dtypes", dtypes_of(options.mixed_precision));
}

// Every rank draws rank 0's random numbers: what broadcast_from_rank0() is to a model that has its values.
void adopt_seeds(Recording& recording, comm::Communicator& world) {
  auto states = recording.seeds();
  for (auto& state : states) {
    state = world.exchange(state).front();
  }
  recording.set_seeds(states);
}

// Gives the units' shards their values by replaying the model's construction; other tensors of the model keep theirs.
void fill_from(Recording& recording, const std::vector<std::unique_ptr<Unit>>& units) {
  struct Place {
    FlatParameter* flat;
    const Member* member;
  };
  std::unordered_map<const c10::StorageImpl*, std::vector<Place>> places;
  for (const auto& unit : units) {
    for (const auto& flat : unit->flats) {
      flat->shard = flat->zeros(flat->master_dtype);
      for (const auto& member : flat->members) {
        if (recording.pending(member.parameter)) {
          places[member.parameter.storage().unsafeGetStorageImpl()].push_back({flat.get(), &member});
        } else {
          flat->fill(member, member.parameter, unit->group->rank());
        }
      }
    }
  }
  recording.replay([&](const c10::Storage& storage) {
    const auto found = places.find(storage.unsafeGetStorageImpl());
    if (found == places.end()) {
      return true;
    }
    for (const auto& [flat, member] : found->second) {
      flat->fill(*member, member->parameter, flat->unit->group->rank());
    }
    return false;
  });
}

template <class Model>
ShardedModel shard(Model& model, ShardOptions options, Recording* recording = nullptr) {
  check_options(options);
  const auto tree = ModuleTree::of(model);
  for (const auto& node : tree.nodes) {
    for (const auto& [name, tensor] : node.parameters) {
      TORCH_CHECK_VALUE(
          !tensor.key_set().has(kPagedKey), "[fully_shard] '", name,
          "' is sharded already; call fully_shard() once, on the outermost module, with a wrap policy "
          "for the parts");
    }
  }
  const auto ignored = ignored_parameters(tree, options.ignored, options.ignored_parameters);
  const auto plans =
      plan_units(tree, options.wrap, options.mixed_precision.keep_full, ignored, /*deferred=*/recording || is_dry());
  auto settings = settings_of(options);
  if (recording) {
    settings += ", deferred_init() of " + recording->summary();
  }
  check_same_model("fully_shard", tree, settings, names_of(plans), *options.mesh.world());
  TORCH_CHECK_VALUE(
      !plans.empty(),
      "[fully_shard] expected a model with parameters to shard, got none; register them with "
      "register_parameter(), and do not ignore all of them");
  if (!recording) {
    check_aliases(tree, plans);
  }
  if (options.sync_module_states && recording) {
    adopt_seeds(*recording, *options.mesh.world());
  } else if (options.sync_module_states) {
    broadcast_from_rank0(tree, *options.mesh.world());
  }
  install_fallback();
  if (tree.script && plans.front().parameters.front().tensor.device().type() != c10::kCPU) {
    // The fuser reads parameters by pointer, past the dispatcher.
    torch::jit::setTensorExprFuserEnabled(false);
  }
  const auto tier = options.offload
                        ? std::make_shared<Tier>(*options.offload, plans.front().parameters.front().tensor.device())
                        : nullptr;
  std::vector<std::unique_ptr<Unit>> units;
  for (const auto& plan : plans) {
    units.push_back(make_unit(plan, static_cast<int>(units.size()), options, tier));
  }
  if (recording) {
    fill_from(*recording, units);
    check_aliases(tree, plans);
  }
  convert_buffers(tree, options);
  auto engine = std::make_shared<Engine>(std::move(options), std::move(units));
  engine->set_ignored(ignored);
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
    case Strategy::kHybridShard:
      return "hybrid_shard";
    case Strategy::kHybridShardZero2:
      return "hybrid_shard_zero2";
  }
  return "?";
}

ShardedModel fully_shard(torch::nn::Module& model, ShardOptions options) {
  return shard(model, std::move(options));
}

ShardedModel fully_shard(torch::nn::Module& model, Recording& recording, ShardOptions options) {
  return shard(model, std::move(options), &recording);
}

ShardedModel fully_shard(torch::jit::Module& model, ShardOptions options) {
  return shard(model, std::move(options));
}

} // namespace ebb::shard
