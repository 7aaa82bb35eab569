#include "ebb/shard/fully_shard.h"

#include "dispatch.h"
#include "dry_mode.h"
#include "ebb/base/error.h"
#include "ebb/base/log.h"
#include "ebb/comm/init.h"
#include "ebb/shard/deferred_init.h"
#include "engine.h"
#include "make_units.h"
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
#include <unordered_map>

namespace ebb::shard {
namespace {

void move_buffers(const ModuleTree& tree, const ShardOptions& options) {
  const auto ignored = covered_nodes(tree, options.ignored);
  for (std::size_t i = 0; i < tree.nodes.size() && options.device; ++i) {
    for (auto [name, buffer] : tree.nodes[i].buffers) {
      if (buffer.defined() && !ignored[i] && buffer.device() != *options.device) {
        buffer.set_data(buffer.to(*options.device));
      }
    }
  }
}

// Returns those that it has converted, with the dtypes that they had.
std::vector<std::pair<at::Tensor, c10::ScalarType>> convert_buffers(
    const ModuleTree& tree, const ShardOptions& options) {
  const auto& mixed = options.mixed_precision;
  std::vector<std::pair<at::Tensor, c10::ScalarType>> converted;
  if (!mixed.buffer_dtype) {
    return converted;
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
        converted.emplace_back(buffer, buffer.scalar_type());
        buffer.set_data(buffer.to(*mixed.buffer_dtype));
      }
    }
  }
  return converted;
}

// With its index, and known to be there.
c10::Device existing(c10::Device device) {
  std::string reason = "it holds no values";
  try {
    if (!device.is_meta()) {
      return at::empty({1}, at::TensorOptions().device(device)).device();
    }
  } catch (const c10::Error& error) {
    reason = message_of(error);
  }
  TORCH_CHECK_VALUE(
      false, "[fully_shard] expected a device that this process can use, got ShardOptions::device ", device, ": ",
      reason.substr(0, reason.find('\n')));
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
    for (const auto& parameter : plan.parameters) {
      text += parameter.compute_dtype ? c10::str(" ", *parameter.compute_dtype) : "";
    }
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
        !dtype || can_compute_in(*dtype),
        "[fully_shard] expected dtypes of mixed_precision among float32, bfloat16, float16 and float64, got ", *dtype);
  }
}

std::string settings_of(const ShardOptions& options) {
  return c10::str(
      "strategy ", name_of(options.strategy), ", frames ", options.frames, ", prefetch ", options.prefetch,
      ", sync_module_states ", options.sync_module_states, ", check_order ", options.check_order, ", divide factor ",
      options.gradient_divide_factor.value_or(0), ", backward_prefetch ", static_cast<int>(options.backward_prefetch),
      ", separate_reduce_group ", options.separate_reduce_group, ", comm_hook ", options.comm_hook ? "given" : "none",
      ", gather_hook ", options.gather_hook ? "given" : "none", ", dtypes", dtypes_of(options.mixed_precision));
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
  if (options.device) {
    options.device = existing(*options.device);
  }
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
  auto plans =
      plan_units(tree, options.wrap, options.mixed_precision.keep_full, ignored, /*deferred=*/recording || is_dry());
  override_dtypes(plans, options.mixed_precision);
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
  const auto device = options.device.value_or(plans.front().parameters.front().tensor.device());
  if (tree.script && !device.is_cpu()) {
    // The fuser reads parameters by pointer, past the dispatcher.
    torch::jit::setTensorExprFuserEnabled(false);
  }
  const auto tier = options.offload ? std::make_shared<Tier>(*options.offload, device) : nullptr;
  std::vector<std::unique_ptr<Unit>> units;
  for (const auto& plan : plans) {
    units.push_back(make_unit(plan, static_cast<int>(units.size()), options, tier));
  }
  if (recording) {
    fill_from(*recording, units);
    check_aliases(tree, plans);
  }
  move_buffers(tree, options);
  auto buffers = convert_buffers(tree, options);
  auto engine = std::make_shared<Engine>(std::move(options), std::move(units));
  engine->set_ignored(ignored);
  engine->set_buffers(std::move(buffers));
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
