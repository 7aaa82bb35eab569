#include "dispatch.h"
#include "engine.h"
#include "gradients.h"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/torch.h>

#include <utility>

namespace ebb::shard {

void Engine::set_all_reduce(const std::vector<int>& units, bool all_reduce) {
  const std::lock_guard lock(mutex_);
  for (const int index : units) {
    units_[index]->all_reduce = all_reduce;
  }
}

void Engine::set_last_backward(bool last) {
  const std::lock_guard lock(mutex_);
  last_backward_ = last;
}

void Engine::set_manual_finalization(bool manual) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_VALUE(
      !unfinished_ && !armed_,
      "[set_manual_backward_finalization] a backward has not been finalized; call finalize_backward() first");
  manual_ = manual;
}

void Engine::start_finalizing() {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_VALUE(
      manual_,
      "[finalize_backward] expected a model after set_manual_backward_finalization(true); without it each backward "
      "ends by itself");
  TORCH_CHECK_VALUE(
      torch::autograd::get_current_graph_task_id() == -1,
      "[finalize_backward] called inside a backward (a hook or a custom Function); call it after the backward");
  drop_failed_backward();
  unfinished_ = true;
  try {
    reducer_->start_rest();
  } catch (...) {
    reset();
    throw;
  }
}

void Engine::finish_finalizing() {
  const std::lock_guard lock(mutex_);
  if (!unfinished_) {
    return;
  }
  try {
    reducer_->finish();
  } catch (...) {
    reset();
    throw;
  }
  unfinished_ = false;
  end_step();
}

void Engine::set_max_reductions(int number) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_VALUE(
      number >= 1, "[set_reduce_scatter_max_input_buffers] expected at least 1 reduction under way, got ", number);
  TORCH_CHECK_VALUE(!armed_, "[set_reduce_scatter_max_input_buffers] called inside a backward; call it between steps");
  reducer_->set_max_in_flight(static_cast<std::size_t>(number));
}

std::int64_t Engine::max_reduce_buffers() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::int64_t>(reducer_->max_buffers());
}

void Engine::set_keep_storage(const std::vector<int>& units, bool keep) {
  const std::lock_guard lock(mutex_);
  for (const int index : units) {
    units_[index]->keep_storage = keep && !units_[index]->in_place;
    if (!keep) {
      units_[index]->own_memory = at::Tensor();
    }
  }
}

void Engine::set_post_optim_event(std::function<void()> done) {
  const std::lock_guard lock(mutex_);
  has_post_optim_event_.store(static_cast<bool>(done), std::memory_order_release);
  post_optim_event_ = std::move(done);
}

// Without the lock: the optimizer that is waited for takes it for each shard that it writes.
void Engine::await_optimizer() {
  if (!has_post_optim_event_.load(std::memory_order_acquire)) {
    return;
  }
  std::function<void()> done;
  {
    const std::lock_guard lock(mutex_);
    done = std::exchange(post_optim_event_, nullptr);
    has_post_optim_event_.store(false, std::memory_order_release);
  }
  if (done) {
    done();
  }
}

void Engine::reshard_all() {
  resident_.release_gathers();
  resident_.drop_near_slices();
  for (auto& unit : units_) {
    if (unit->frame) {
      resident_.reshard(*unit);
    }
  }
  current_ = nullptr;
}

void Engine::set_full_precision(bool full) {
  await_optimizer();
  const std::lock_guard lock(mutex_);
  drop_failed_backward();
  TORCH_CHECK_VALUE(
      !armed_ && full_scopes_ == 0,
      "[set_full_precision] called inside a backward or a full_parameters() scope; call it after that");
  if (std::exchange(full_precision_, full) == full) {
    return;
  }
  const at::NoGradGuard no_grad;
  const OwnAccess own;
  reshard_all();
  for (auto& unit : units_) {
    unit->own_memory = at::Tensor();
    for (auto& flat : unit->flats) {
      if (flat->param_dtype != flat->master_dtype) {
        flat->compute_in(full ? flat->master_dtype : flat->param_dtype);
      }
    }
    unit->place_in_frame();
  }
  resident_.refit_frames();
  for (auto& [buffer, dtype] : buffers_) {
    buffer.set_data(buffer.to(full ? dtype : *options_.mixed_precision.buffer_dtype));
  }
}

} // namespace ebb::shard
