#include "dispatch.h"
#include "ebb/base/error.h"
#include "ebb/base/log.h"
#include "engine.h"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/torch.h>

#include <algorithm>
#include <utility>

namespace ebb::shard {

FullParameters::FullParameters(std::shared_ptr<Engine> engine, FullParametersOptions options)
    : engine_(std::move(engine)), options_(options) {
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

void Engine::begin_full_parameters(const FullParametersOptions& options) {
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
  const at::NoGradGuard no_grad;
  current_ = nullptr;
  resident_.drop_near_slices(); // the scope may change what they are copies of
  for (auto& unit : units_) {
    if (unit->in_place) {
      for (auto& flat : unit->flats) {
        flat->full = options.writeback ? at::Tensor() : flat->shard.clone(); // what it goes back to
      }
      continue;
    }
    if (unit->frame) {
      resident_.reshard(*unit);
    }
    const bool mixed = std::any_of(unit->flats.begin(), unit->flats.end(), [](auto& flat) { return flat->is_mixed(); });
    if (mixed) { // in full precision, so that nothing is lost when it is written back
      for (auto& flat : unit->flats) {
        open_full(*flat, options.rank0_only && world().rank() != 0);
      }
      continue;
    }
    resident_.gather_kept(*unit);
    resident_.finish_gather(*unit);
    if (options.rank0_only && world().rank() != 0) {
      resident_.reshard(*unit);
    }
  }
  resident_.release_gathers();
  ++full_scopes_; // last: after a lost rank there is no scope
}

void Engine::open_full(FlatParameter& flat, bool only_help) {
  auto memory = resident_.gather_full(flat);
  if (only_help) {
    resident_.give_back_full(flat);
    return;
  }
  flat.full = memory;
  const auto storage = c10::make_intrusive<PagedStorage>(flat.owner, PageKind::kFull, memory.nbytes(), flat.device);
  storage->fill(memory.view(at::kByte), 0);
  flat.point_parameters_at(storage, flat.master_dtype);
}

void Engine::close_full(FlatParameter& flat) {
  flat.point_parameters_at(flat.storage, flat.dtype);
  flat.full = at::Tensor();
  resident_.give_back_full(flat);
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
    if (unit->in_place) {
      for (auto& flat : unit->flats) {
        if (flat->full.defined()) {
          flat->shard.copy_(std::exchange(flat->full, at::Tensor()));
        }
      }
      continue;
    }
    for (auto& flat : unit->flats) {
      const auto& whole = flat->full.defined() ? flat->full : flat->flat;
      if (options.writeback && (unit->frame || flat->full.defined())) {
        flat->shard.copy_(whole.narrow(0, unit->group->rank() * flat->shard_numel, flat->shard_numel));
      }
      if (flat->full.defined()) {
        close_full(*flat);
      }
    }
    if (unit->frame) {
      resident_.reshard(*unit);
    }
  }
  current_ = nullptr;
}

} // namespace ebb::shard
