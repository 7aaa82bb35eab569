#include "engine.h"

#include "dispatch.h"
#include "ebb/base/error.h"
#include "ebb/base/log.h"
#include "gradients.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/torch.h>

#include <algorithm>

namespace ebb::shard {
namespace {

// Gathers whose input may still be read by peers; more than this are waited for in turn.
constexpr std::size_t kMaxUnreleased = 8;

std::int64_t largest_unit(const std::vector<std::unique_ptr<Unit>>& units) {
  std::int64_t bytes = 0;
  for (const auto& unit : units) {
    bytes = std::max(bytes, unit->bytes);
  }
  return bytes;
}

std::string no_data_message(const FlatParameter& flat) {
  std::string names;
  for (std::size_t i = 0; i < flat.members.size(); ++i) {
    if (i == 6) {
      names += c10::str(" and ", flat.members.size() - i, " more");
      break;
    }
    names += (i ? ", '" : "'") + flat.members[i].name + "'";
  }
  return "[fully_shard] raw access to a sharded parameter of unit '" + flat.unit->name + "' (" + names +
      "): its data is on the ranks' shards and no operator is using it. Read it through a LibTorch operator (item(), "
      "clone(), ...), or open a scope with ShardedModel::full_parameters() first";
}

} // namespace

Engine::Engine(ShardOptions options, std::vector<std::unique_ptr<Unit>> units)
    : options_(std::move(options)),
      group_(options_.mesh.axis("shard")),
      units_(std::move(units)),
      order_(static_cast<int>(units_.size())) {
  const auto device = units_.empty() ? c10::Device(c10::kCPU) : units_.front()->flats.front()->device;
  frames_ = FramePool(options_.frames + options_.prefetch, largest_unit(units_), device);
  reducer_ = std::make_unique<GradientReducer>(*this);
}

Engine::~Engine() {
  for (auto& unit : units_) {
    for (auto& flat : unit->flats) {
      if (flat->owner) {
        flat->owner->engine = nullptr;
      }
      if (flat->storage && options_.strategy != Strategy::kNoShard) {
        // The frame goes with this engine; a parameter that was resident must not point into it.
        flat->storage->empty(no_data_message(*flat) + ". The ShardedModel is gone: keep it alive as long as the model");
      }
    }
  }
}

void Engine::take_over() {
  const bool in_place = options_.strategy == Strategy::kNoShard;
  for (auto& unit : units_) {
    for (auto& flat : unit->flats) {
      flat->owner = std::make_shared<PageOwner>();
      flat->owner->flat = flat.get();
      flat->owner->unit_name = unit->name;
      flat->take_over(in_place ? 0 : group_->rank(), in_place);
      flat->owner->engine = this;
      if (!in_place) {
        flat->storage->empty(no_data_message(*flat));
      }
      attach_gradient_hooks(*flat);
    }
    if (in_place) {
      unit->residence = Residence::kResident;
      unit->kept = true;
      held_bytes_ += unit->bytes;
      kept_bytes_ += unit->bytes;
    }
  }
  peak_held_bytes_ = held_bytes_;
}

Pass Engine::current_pass() const {
  if (torch::autograd::get_current_graph_task_id() != -1) {
    return Pass::kBackward;
  }
  return at::GradMode::is_enabled() ? Pass::kForward : Pass::kEvaluation;
}

void Engine::begin_backward_if_needed() {
  if (armed_ && backward_.expired()) {
    log::warn("the last backward ended by an exception; what it left behind is dropped");
    reset();
  }
  if (armed_) {
    return;
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
  armed_ = true;
}

void Engine::touch_and_pin(FlatParameter& flat) {
  const std::lock_guard lock(mutex_);
  Unit& unit = *flat.unit;
  if (torch::autograd::get_current_graph_task_id() != -1) {
    begin_backward_if_needed();
  } else if (armed_) {
    log::warn("the last backward ended by an exception; what it left behind is dropped");
    reset();
  }
  if (&unit != current_) {
    visit(unit);
  }
  if (unit.residence == Residence::kResident) {
    ++stats_.touches;
  } else {
    if (unit.residence == Residence::kSharded) { // dropped since the visit, by a write to its shard
      start_gather(unit, *frame_for(unit, /*may_exceed=*/true), /*prefetch=*/false);
    }
    finish_gather(unit);
  }
  unit.prefetched = false;
  ++unit.pins;
}

void Engine::unpin(FlatParameter& flat) {
  const std::lock_guard lock(mutex_);
  Unit& unit = *flat.unit;
  if (--unit.pins == 0 && unit.frame && unit.frame->extra && !unit.kept) {
    reshard(unit);
  }
}

void Engine::visit(Unit& unit) {
  const auto pass = current_pass();
  order_.visit(unit.index, pass);
  current_ = &unit;
  unit.last_use = ++tick_;
  if (options_.strategy == Strategy::kNoShard) {
    return;
  }
  if (unit.residence == Residence::kSharded) {
    start_gather(unit, *frame_for(unit, /*may_exceed=*/true), /*prefetch=*/false);
  }
  prefetch();
}

void Engine::prefetch() {
  for (const int index : order_.upcoming(options_.prefetch)) {
    Unit& next = *units_[faults_.wrong_prefetch ? (index + 1) % units_.size() : index];
    if (next.residence != Residence::kSharded) {
      continue;
    }
    auto frame = frame_for(next, /*may_exceed=*/false);
    if (!frame) {
      return;
    }
    start_gather(next, std::move(*frame), /*prefetch=*/true);
    ++stats_.prefetched;
  }
}

bool Engine::keeps(const Unit& /*unit*/, Pass pass) const {
  return options_.strategy == Strategy::kShardGradOp && pass == Pass::kForward;
}

std::optional<Frame> Engine::frame_for(Unit& unit, bool may_exceed) {
  if (keeps(unit, current_pass())) {
    unit.kept = true;
    return frames_.take_kept(unit.bytes);
  }
  if (auto frame = frames_.take_if_free()) {
    return frame;
  }
  if (Unit* evicted = victim(unit, may_exceed ? -1 : order_.next_use(unit.index))) {
    ++stats_.evictions;
    reshard(*evicted);
    return frames_.take_if_free();
  }
  if (may_exceed) {
    return frames_.take_extra(unit.bytes);
  }
  return std::nullopt;
}

// The unit whose next use is farthest, then the one used longest ago (Belady's rule as far as the order is known).
Unit* Engine::victim(const Unit& for_unit, std::int64_t needed_sooner_than) const {
  Unit* best = nullptr;
  std::int64_t best_next = -1;
  for (const auto& candidate : units_) {
    if (!candidate->frame || candidate->frame->extra || candidate->kept || candidate->pins > 0 ||
        candidate.get() == current_ || candidate.get() == &for_unit) {
      continue;
    }
    const auto next = order_.next_use(candidate->index);
    if (next <= needed_sooner_than) {
      continue;
    }
    if (!best || next > best_next || (next == best_next && candidate->last_use < best->last_use)) {
      best = candidate.get();
      best_next = next;
    }
  }
  return best;
}

void Engine::start_gather(Unit& unit, Frame frame, bool prefetch) {
  check_same_order("unshard", unit);
  event(prefetch ? "prefetch" : "unshard", unit);
  if (log::enabled(log::Level::kDebug)) {
    log::debug("{} unit '{}' {} bytes", prefetch ? "prefetch" : "unshard", unit.name, unit.bytes);
  }
  ++stats_.unshards;
  held_bytes_ += unit.bytes;
  peak_held_bytes_ = std::max(peak_held_bytes_, held_bytes_);
  if (unit.kept) {
    kept_bytes_ += unit.bytes;
  } else if (frame.extra) {
    extra_bytes_ += unit.bytes;
  }
  unit.frame = std::move(frame);
  unit.prefetched = prefetch;
  unit.residence = Residence::kGathering;
  const auto& memory = unit.frame->memory;
  for (auto& flat : unit.flats) {
    flat->storage->fill(memory, flat->frame_offset);
    // Given as a tensor of its own: a gather that is abandoned keeps the memory until the transport is done with it.
    auto output = memory.narrow(0, flat->frame_offset, flat->padded_bytes()).view(flat->dtype);
    unit.gathers.push_back(group_->all_gather(output, flat->shard, unit.name));
  }
  check_invariant();
}

void Engine::finish_gather(Unit& unit) {
  for (auto& gather : unit.gathers) {
    gather->wait();
    unreleased_.push_back(std::move(gather));
  }
  unit.gathers.clear();
  unit.residence = Residence::kResident;
  while (unreleased_.size() > kMaxUnreleased) {
    unreleased_.front()->release();
    unreleased_.erase(unreleased_.begin());
  }
}

void Engine::release_gathers() {
  for (auto& gather : unreleased_) {
    gather->release();
  }
  unreleased_.clear();
}

void Engine::reshard(Unit& unit) {
  TORCH_INTERNAL_ASSERT(unit.pins == 0, "unit '", unit.name, "' is resharded while an operator uses it");
  if (unit.residence == Residence::kGathering) {
    finish_gather(unit);
  }
  if (!unit.frame) {
    return;
  }
  if (unit.prefetched) {
    ++stats_.mispredicted;
    unit.prefetched = false;
  }
  event("reshard", unit);
  log::debug("reshard unit '{}' {} bytes", unit.name, unit.bytes);
  for (auto& flat : unit.flats) {
    flat->storage->empty(no_data_message(*flat));
  }
  held_bytes_ -= unit.bytes;
  if (unit.kept) {
    kept_bytes_ -= unit.bytes;
  } else if (unit.frame->extra) {
    extra_bytes_ -= unit.bytes;
  }
  unit.kept = false;
  unit.residence = Residence::kSharded;
  frames_.give_back(std::move(*unit.frame));
  unit.frame.reset();
}

void Engine::check_write(const FlatParameter& flat, const at::Tensor& written, const std::string& op) const {
  const std::lock_guard lock(mutex_);
  const bool changes_storage = op == "aten::set_" || op == "aten::resize_" || op == "aten::resize_as_";
  TORCH_CHECK_VALUE(
      full_scopes_ > 0 && !changes_storage,
      "[", op, "] ", describe(flat, written),
      changes_storage ? " is sharded and cannot be given other storage or another size; copy values into it with copy_() inside "
                        "a ShardedModel::full_parameters() scope"
                      : " is sharded and was written to outside a ShardedModel::full_parameters() scope; open one (changes "
                        "then go to the shards), or, for an optimizer, build it on the ShardedModel's parameters()");
}

void Engine::before_shard_write(FlatParameter& flat) {
  const std::lock_guard lock(mutex_);
  if (OwnAccess::active() || options_.strategy == Strategy::kNoShard) {
    return;
  }
  Unit& unit = *flat.unit;
  TORCH_CHECK_VALUE(
      full_scopes_ == 0,
      "[fully_shard] a shard of unit '", unit.name,
      "' was written to (by an optimizer step?) inside a full_parameters() scope, whose end would undo it; step after the scope");
  release_gathers();
  // The gathered copy is out of date now.
  if (unit.pins == 0 && unit.residence != Residence::kSharded) {
    reshard(unit);
    if (current_ == &unit) {
      current_ = nullptr;
    }
  }
}

std::string Engine::describe(const FlatParameter& flat, const at::Tensor& view) const {
  const Member* member = flat.member_at(view.storage_offset());
  return c10::str("'", member ? member->name : std::string("?"), "' (unit '", flat.unit->name, "')");
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
    reducer_->finish();
  } catch (...) {
    reset();
    throw;
  }
  for (auto& unit : units_) {
    if (unit->frame && unit->pins == 0 && full_scopes_ == 0) {
      reshard(*unit);
    }
  }
  release_gathers();
  order_.end_step();
  current_ = nullptr;
  armed_ = false;
}

void Engine::reset() {
  const std::lock_guard lock(mutex_);
  armed_ = false;
  current_ = nullptr;
  reducer_->abandon();
  unreleased_.clear();
  order_.end_step();
  if (full_scopes_ > 0) {
    return;
  }
  for (auto& unit : units_) {
    if (!unit->frame) {
      continue;
    }
    unit->pins = 0;
    if (unit->residence == Residence::kGathering) {
      // The transport may still be writing into the frame: it goes with the works and does not come back to the pool.
      unit->gathers.clear();
      unit->residence = Residence::kResident;
      frames_.lose(*unit->frame);
    }
    reshard(*unit);
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
  if (armed_) {
    reset();
  }
  ++full_scopes_;
  if (options_.strategy == Strategy::kNoShard) {
    return;
  }
  current_ = nullptr;
  for (auto& unit : units_) {
    if (unit->frame) {
      reshard(*unit);
    }
    unit->kept = true;
    start_gather(*unit, frames_.take_extra(unit->bytes), /*prefetch=*/false);
    finish_gather(*unit);
    if (options.rank0_only && group_->rank() != 0) {
      reshard(*unit);
    }
  }
  release_gathers();
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
    reshard(*unit);
  }
  current_ = nullptr;
}

Residency Engine::residency() const {
  const std::lock_guard lock(mutex_);
  return {held_bytes_, peak_held_bytes_, frames_.capacity() * frames_.frame_bytes(), extra_bytes_, kept_bytes_};
}

ShardStats Engine::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void Engine::reset_stats() {
  const std::lock_guard lock(mutex_);
  stats_ = {};
  peak_held_bytes_ = held_bytes_;
}

void Engine::check_invariant() const {
#ifdef EBB_CHECK_INVARIANTS
  const auto allowed = frames_.capacity() * frames_.frame_bytes() + extra_bytes_ + kept_bytes_;
  TORCH_INTERNAL_ASSERT(
      held_bytes_ <= allowed,
      "unsharded parameters hold ", held_bytes_, " bytes, more than the ", allowed, " of frames, pinned and kept units");
#endif
}

// All ranks must start the same collectives in the same order. Here they compare notes before each.
void Engine::check_same_order(std::string_view what, const Unit& unit) {
  if (!options_.check_order || group_->size() == 1) {
    return;
  }
  const auto mine = std::string(what) + " of unit '" + unit.name + "'";
  const auto all = group_->exchange(mine);
  for (int rank = 1; rank < group_->size(); ++rank) {
    if (all[rank] != all[0]) {
      EBB_THROW(
          IncompatibleStateError,
          "[fully_shard] ranks use units in different orders: rank 0 starts the ", all[0], ", rank ", rank, " the ", all[rank],
          "; all ranks must run the same modules in the same order (a branch on rank or on local data?)");
    }
  }
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

void Engine::inject(Faults faults) {
  const std::lock_guard lock(mutex_);
  faults_ = faults;
}

std::vector<std::string> Engine::take_events() {
  const std::lock_guard lock(mutex_);
  return std::exchange(events_, {});
}

} // namespace ebb::shard
