#include "dispatch.h"
#include "ebb/base/error.h"
#include "ebb/base/log.h"
#include "engine.h"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/torch.h>

#include <algorithm>
#include <set>
#include <utility>

namespace ebb::shard {

FullParameters::FullParameters(std::shared_ptr<Engine> engine, FullParametersOptions options)
    : engine_(std::move(engine)), options_(std::move(options)) {
  engine_->begin_full_parameters(options_);
}

FullParameters::~FullParameters() {
  try {
    close();
  } catch (const std::exception& error) {
    log::error("closing a full_parameters() scope failed: {}", message_of(error));
  }
}

void FullParameters::close() {
  if (const auto engine = std::exchange(engine_, nullptr)) {
    engine->end_full_parameters(options_);
  }
}

// Units by modules: those that hold a parameter of one of these, or of a module below, under any of its names.
std::vector<int> Engine::scope_of(const FullParametersOptions& options) const {
  std::set<int> found;
  if (options.modules.empty()) {
    for (const auto& unit : units_) {
      found.insert(unit->index);
    }
  } else if (!options.recurse) {
    const auto units = find_units("full_parameters", options.modules);
    found.insert(units.begin(), units.end());
  }
  for (const auto& module : options.recurse ? options.modules : std::vector<std::string>{}) {
    const auto within = [&](const std::string& name) { return module.empty() || name.rfind(module + ".", 0) == 0; };
    bool any = false;
    for (const auto& unit : units_) {
      const bool holds =
          unit->name == module || std::any_of(unit->flats.begin(), unit->flats.end(), [&](auto& flat) {
            return std::any_of(flat->members.begin(), flat->members.end(), [&](const Member& member) {
              return within(member.name) || std::any_of(member.tied_names.begin(), member.tied_names.end(), within);
            });
          });
      if (holds) {
        found.insert(unit->index);
        any = true;
      }
    }
    TORCH_CHECK_VALUE(
        any, "[full_parameters] expected names of modules with sharded parameters, got '", module,
        "'; see model->named_modules()");
  }
  return {found.begin(), found.end()};
}

void Engine::begin_full_parameters(const FullParametersOptions& options) {
  await_optimizer();
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_VALUE(
      !(options.rank0_only && options.writeback),
      "[full_parameters] rank0_only excludes writeback, got both: the other ranks would not see rank 0's changes; pass "
      "{.writeback = false, .rank0_only = true}");
  TORCH_CHECK_VALUE(full_scopes_ == 0, "[full_parameters] a scope is already open; close it before opening another");
  TORCH_CHECK_VALUE(
      torch::autograd::get_current_graph_task_id() == -1,
      "[full_parameters] called inside a backward (a hook or a custom Function); open the scope before or after it");
  drop_failed_backward();
  const auto units = scope_of(options);
  if (options.with_grads) {
    streams_.join(Lane::kReduce);
    check_same_gradients(units);
  }
  const at::NoGradGuard no_grad;
  current_ = nullptr;
  resident_.drop_near_slices(); // the scope may change what they are copies of
  try {
    for (const int index : units) {
      open(*units_[index], options);
    }
  } catch (...) { // what is open already would go on showing the values of now
    const OwnAccess own;
    for (const int index : units) {
      if (units_[index]->residence == Residence::kGathering) {
        resident_.lose(*units_[index]);
      }
      close(*units_[index], {.writeback = false, .with_grads = options.with_grads});
    }
    throw;
  }
  resident_.release_gathers();
  for (const int index : units) { // last: after a lost rank there is no scope
    units_[index]->in_scope = true;
  }
  ++full_scopes_;
}

void Engine::open(Unit& unit, const FullParametersOptions& options) {
  const bool only_help = options.rank0_only && world().rank() != 0;
  if (unit.frame) {
    resident_.reshard(unit);
  }
  // Mixed: in full precision, so that nothing is lost when it is written back.
  const bool mixed = std::any_of(unit.flats.begin(), unit.flats.end(), [](auto& flat) { return flat->is_mixed(); });
  if (mixed || options.offload_to_cpu) {
    for (auto& flat : unit.flats) {
      open_full(*flat, only_help, options.offload_to_cpu);
    }
  } else if (unit.in_place) {
    for (auto& flat : unit.flats) {
      flat->saved = options.writeback ? at::Tensor() : flat->shard.clone();
    }
  } else {
    resident_.gather_exactly(unit);
    if (only_help) {
      resident_.reshard(unit);
    }
  }
  if (options.with_grads) {
    for (auto& flat : unit.flats) {
      open_gradients(*flat, only_help, options.offload_to_cpu);
    }
  }
}

void Engine::open_full(FlatParameter& flat, bool only_help, bool on_cpu) {
  auto memory = resident_.gather_full(flat);
  if (only_help) {
    resident_.give_back_full(flat);
    return;
  }
  if (on_cpu && !memory.is_cpu()) {
    resident_.give_back_full(flat); // first, as the copy may fail
    memory = memory.cpu();
  }
  flat.full = memory;
  const auto storage = c10::make_intrusive<PagedStorage>(flat.owner, PageKind::kFull, memory.nbytes(), memory.device());
  storage->fill(memory.view(at::kByte), 0);
  flat.point_parameters_at(storage, flat.master_dtype);
}

void Engine::close_full(FlatParameter& flat) {
  flat.point_parameters_at(flat.storage, flat.dtype);
  const bool counted = std::exchange(flat.full, at::Tensor()).device() == flat.device;
  if (counted) {
    resident_.give_back_full(flat);
  }
}

void Engine::end_full_parameters(const FullParametersOptions& options) {
  const std::lock_guard lock(mutex_);
  if (full_scopes_ == 0) {
    return;
  }
  --full_scopes_;
  stage_.drop_all();
  const at::NoGradGuard no_grad;
  const OwnAccess own;
  for (auto& unit : units_) {
    unit->shard_written = true;
    if (std::exchange(unit->in_scope, false)) {
      close(*unit, options);
    }
  }
  current_ = nullptr;
}

void Engine::close(Unit& unit, const FullParametersOptions& options) {
  for (auto& flat : unit.flats) {
    if (options.with_grads) {
      close_gradients(*flat, options.writeback);
    }
    if (flat->saved.defined()) {
      flat->shard.copy_(std::exchange(flat->saved, at::Tensor()));
    }
    const auto& whole = flat->full.defined() ? flat->full : flat->flat;
    if (options.writeback && (unit.frame || flat->full.defined())) {
      flat->shard.copy_(whole.narrow(0, unit.group->rank() * flat->shard_numel, flat->shard_numel));
    }
    if (flat->full.defined()) {
      close_full(*flat);
    }
  }
  if (unit.frame) {
    resident_.reshard(unit);
  }
}

} // namespace ebb::shard
