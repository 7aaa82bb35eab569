#include "engine.h"

#include "dispatch.h"
#include "ebb/base/error.h"
#include "ebb/base/log.h"
#include "gradients.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/torch.h>

#include <utility>

namespace ebb::shard {

Engine::Engine(ShardOptions options, std::vector<std::unique_ptr<Unit>> units)
    : options_(std::move(options)),
      reduce_mesh_(options_.separate_reduce_group ? options_.mesh.separate() : options_.mesh),
      units_(std::move(units)),
      order_(static_cast<int>(units_.size())),
      streams_(units_.empty() ? Streams() : Streams::of(units_.front()->flats.front()->device)),
      stage_(units_.empty() ? nullptr : units_.front()->flats.front()->tier, streams_),
      resident_(*this) {
  reducer_ = std::make_unique<GradientReducer>(*this);
  const auto& mixed = options_.mixed_precision;
  casts_inputs_ = mixed.cast_forward_inputs && (mixed.param_dtype || mixed.param_dtype_override_fn);
}

Engine::~Engine() {
  streams_.join_quietly(); // before memory is given back that they may be using
  for (auto& unit : units_) {
    for (auto& flat : unit->flats) {
      if (flat->owner) {
        flat->owner->engine = nullptr;
      }
      if (flat->storage && !unit->in_place) {
        // The frame goes with this engine; a parameter that was resident must not point into it.
        flat->storage->empty(no_data_message(*flat) + ". The ShardedModel is gone: keep it alive as long as the model");
      }
    }
  }
}

void Engine::take_over() {
  for (auto& unit : units_) {
    for (auto& flat : unit->flats) {
      flat->owner = std::make_shared<PageOwner>();
      flat->owner->flat = flat.get();
      flat->owner->unit_name = unit->name;
      flat->take_over(unit->group->rank(), unit->in_place);
      flat->owner->engine = this;
      if (!unit->in_place) {
        flat->storage->empty(no_data_message(*flat));
      }
      attach_gradient_hooks(*flat);
    }
    if (unit->in_place) {
      resident_.hold_in_place(*unit);
    }
  }
}

Pass Engine::current_pass() const {
  if (torch::autograd::get_current_graph_task_id() != -1) {
    return Pass::kBackward;
  }
  return at::GradMode::is_enabled() ? Pass::kForward : Pass::kEvaluation;
}

void Engine::drop_failed_backward() {
  if (!armed_) {
    return;
  }
  const bool inside = torch::autograd::get_current_graph_task_id() != -1;
  const bool same_thread = backward_thread_ == std::this_thread::get_id();
  if (backward_.expired() || (same_thread && !inside)) {
    log::warn("the last backward ended by an exception; what it left behind is dropped");
    reset();
    return;
  }
  // Backward of a CPU graph, with all that it nests, runs on the thread that called it. Another thread is another use of
  // the model: both would start collectives, in an order that differs from rank to rank.
  TORCH_CHECK_VALUE(
      same_thread || !units_.front()->flats.front()->device.is_cpu(),
      "[fully_shard] expected one thread at a time, got a use of the model on a second thread while a backward through "
      "it is running: their collectives would mix. Let the threads take turns, or give each a model and a group of its "
      "own");
}

bool Engine::begin_backward_if_needed() {
  drop_failed_backward();
  if (armed_) {
    return false;
  }
  auto token = std::make_shared<int>();
  backward_ = token;
  // Queued at the first touch and not in a gradient hook: a recomputation inside a backward then still belongs to the
  // outer graph task, and autograd::grad(), where no hook fires, gets its end too.
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), token = std::move(token)] {
    if (const auto engine = weak.lock()) {
      engine->end_backward();
    }
  });
  backward_thread_ = std::this_thread::get_id();
  armed_ = true;
  return true;
}

void Engine::touch_and_pin(FlatParameter& flat) {
  await_optimizer();
  const std::lock_guard lock(mutex_);
  Unit& unit = *flat.unit;
  bool begins_backward = false;
  if (torch::autograd::get_current_graph_task_id() != -1) {
    begins_backward = begin_backward_if_needed();
  } else {
    drop_failed_backward();
  }
  if (&unit != current_) {
    visit(unit);
  } else if (begins_backward && !unit.backward_prefetch.empty() && !prefetches_after()) {
    prefetch(); // the last unit of forward is not visited again
  }
  if (unit.residence == Residence::kResident) {
    ++stats_.touches;
  } else {
    if (unit.residence == Residence::kSharded) { // dropped since the visit, by a write to its shard
      resident_.gather(unit);
    }
    resident_.finish_gather(unit);
  }
  unit.prefetched = false;
  unit.use_unmarked = streams_.any();
  ++unit.pins;
}

void Engine::unpin(FlatParameter& flat) {
  const std::lock_guard lock(mutex_);
  Unit& unit = *flat.unit;
  if (--unit.pins > 0) {
    return;
  }
  if (unit.frame && unit.frame->extra && !unit.kept) {
    resident_.reshard(unit);
  } else if (unit.use_unmarked && &unit != current_) {
    resident_.mark_used(unit);
  }
}

void Engine::note_width(std::string_view op, std::size_t num_units) {
  const std::lock_guard lock(mutex_);
  if (full_scopes_ == 0 && num_units > static_cast<std::size_t>(resident_.num_frames()) + 1 &&
      !std::exchange(warned_of_width_, true)) {
    log::warn(
        "{} reads the parameters of {} units at once, so that all of these are in memory together ({} frames are "
        "planned); work on the shards instead, ShardedModel::parameters() and its clip_grad_norm_()",
        op, num_units, resident_.num_frames());
  }
}

void Engine::visit(Unit& unit) {
  check_not_unfrozen(unit);
  const auto pass = current_pass();
  if (pass == Pass::kForward && order_.forward_visits().empty()) {
    reducer_->drop_hidden_gradients();
  }
  order_.visit(unit.index, pass);
  if (current_ && current_->use_unmarked && current_->pins == 0) {
    resident_.mark_used(*current_);
  }
  current_ = &unit;
  unit.last_use = ++tick_;
  if (unit.in_place) {
    return;
  }
  if (unit.residence == Residence::kSharded) {
    resident_.gather(unit);
  }
  if (!prefetches_after()) {
    prefetch();
  }
  fetch_ahead();
}

bool Engine::prefetches_after() const {
  return options_.backward_prefetch == BackwardPrefetch::kBackwardPost && current_pass() == Pass::kBackward;
}

void Engine::after_gradients(Unit& unit) {
  if (!prefetches_after() || !current_) {
    return;
  }
  if (unit.frame && unit.pins == 0 && !unit.in_scope && !unit.held && unit.reshard_after_backward) {
    resident_.reshard(unit);
  }
  prefetch();
}

// One unit beyond those that are gathered ahead, so that its shard is on the device when its turn comes.
void Engine::fetch_ahead() {
  if (!stage_.tier()) {
    return;
  }
  if (stage_.units() > options_.prefetch + 1) { // predictions that did not come true
    stage_.drop_all();
  }
  for (const int index : order_.upcoming(options_.prefetch + 1)) {
    const Unit& next = *units_[index];
    if (next.residence == Residence::kSharded && !next.flats.front()->near_slice.defined() && stage_.fetch(next)) {
      event("fetch", next);
    }
  }
}

void Engine::prefetch() {
  const auto& explicit_list =
      current_pass() == Pass::kBackward ? current_->backward_prefetch : current_->forward_prefetch;
  for (const int index : explicit_list.empty() ? order_.upcoming(options_.prefetch) : explicit_list) {
    Unit& next = *units_[faults_.wrong_prefetch ? (index + 1) % units_.size() : index];
    if (next.residence == Residence::kSharded && !resident_.prefetch(next)) {
      return;
    }
  }
}

bool Engine::keeps(const Unit& unit) const {
  const auto pass = current_pass();
  return (pass == Pass::kForward && !unit.reshard_after_forward) ||
         (pass == Pass::kBackward && !unit.reshard_after_backward);
}

void Engine::on_gradient(Unit& unit, FlatParameter& flat, Member& member) {
  const std::lock_guard lock(mutex_);
  begin_backward_if_needed();
  reducer_->on_gradient(unit, flat, member);
}

void Engine::end_backward() {
  const std::lock_guard lock(mutex_);
  if (!armed_) {
    return;
  }
  try {
    if (manual_) {
      unfinished_ = true;
    } else if (last_backward_) {
      reducer_->finish();
    } else {
      reducer_->postpone();
    }
  } catch (...) {
    reset();
    throw;
  }
  for (auto& unit : units_) {
    if (unit->frame && unit->pins == 0 && !unit->in_scope && unit->reshard_after_backward) {
      resident_.reshard(*unit);
    }
  }
  resident_.release_gathers();
  stage_.drop_all();
  if (last_backward_ && !manual_) {
    end_step();
  }
  current_ = nullptr;
  armed_ = false;
}

void Engine::end_step() {
  resident_.drop_near_slices();
  order_.end_step();
}

void Engine::reset() {
  const std::lock_guard lock(mutex_);
  armed_ = false;
  unfinished_ = false;
  current_ = nullptr;
  streams_.join_quietly();
  reducer_->abandon();
  stage_.abandon();
  resident_.abandon();
  end_step();
}

Residency Engine::residency() const {
  const std::lock_guard lock(mutex_);
  auto residency = resident_.residency();
  residency.staged_bytes = stage_.bytes();
  residency.offloaded_bytes = stage_.tier() ? stage_.tier()->bytes() : 0;
  return residency;
}

ShardStats Engine::stats() const {
  const std::lock_guard lock(mutex_);
  auto stats = stats_;
  stats.wait_seconds = meter_.totals().waited;
  stats.comm_seconds = meter_.totals().under_way;
  return stats;
}

void Engine::reset_stats() {
  const std::lock_guard lock(mutex_);
  stats_ = {};
  meter_.reset();
  resident_.reset_peak();
}

void Engine::event(std::string_view what, const Unit& unit) {
  if (recording_) {
    events_.push_back(std::string(what) + " " + unit.name);
  }
}

void Engine::record_events(bool on) {
  const std::lock_guard lock(mutex_);
  recording_ = on;
  events_.clear();
}

void Engine::use_clock(const Clock& clock) {
  const std::lock_guard lock(mutex_);
  meter_.use(clock);
}

void Engine::use_streams(c10::Device device) {
  const std::lock_guard lock(mutex_);
  streams_ = Streams(device);
  if (stage_.tier()) {
    stage_.tier()->use_streams(device);
  }
}

void Engine::inject(Faults faults) {
  const std::lock_guard lock(mutex_);
  faults_ = faults;
}

std::vector<std::string> Engine::take_events() {
  const std::lock_guard lock(mutex_);
  return std::exchange(events_, {});
}

} // namespace ebb::shard
