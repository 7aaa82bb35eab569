#include "dispatch.h"
#include "ebb/base/error.h"
#include "ebb/base/log.h"
#include "engine.h"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/torch.h>

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
  if (options_.strategy == Strategy::kNoShard) {
    ++full_scopes_;
    return;
  }
  current_ = nullptr;
  for (auto& unit : units_) {
    if (unit->frame) {
      resident_.reshard(*unit);
    }
    resident_.gather_kept(*unit);
    resident_.finish_gather(*unit);
    if (options.rank0_only && group_->rank() != 0) {
      resident_.reshard(*unit);
    }
  }
  resident_.release_gathers();
  ++full_scopes_; // last: after a lost rank there is no scope
}

void Engine::end_full_parameters(const FullParametersOptions& options) {
  const std::lock_guard lock(mutex_);
  if (full_scopes_ == 0) {
    return;
  }
  --full_scopes_;
  if (options_.strategy == Strategy::kNoShard) {
    return;
  }
  const at::NoGradGuard no_grad;
  const OwnAccess own;
  for (auto& unit : units_) {
    if (!unit->frame) {
      continue;
    }
    if (options.writeback) {
      for (auto& flat : unit->flats) {
        flat->shard.copy_(flat->flat.narrow(0, group_->rank() * flat->shard_numel, flat->shard_numel));
      }
    }
    resident_.reshard(*unit);
  }
  current_ = nullptr;
}

} // namespace ebb::shard
