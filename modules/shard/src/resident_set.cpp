#include "resident_set.h"

#include "ebb/base/log.h"
#include "engine.h"

#include <torch/torch.h>

#include <algorithm>

namespace ebb::shard {
namespace {

// Gathers whose input may still be read by peers; more than this are waited for in turn.
constexpr std::size_t kMaxUnreleased = 8;
constexpr std::size_t kMostNames = 6;

std::int64_t largest_unit(const Engine& engine) {
  std::int64_t largest = 0;
  for (const auto& unit : engine.units()) {
    largest = std::max(largest, unit->bytes);
  }
  return largest;
}

} // namespace

std::string no_data_message(const FlatParameter& flat) {
  std::string names;
  for (std::size_t i = 0; i < flat.members.size(); ++i) {
    if (i == kMostNames) {
      names += c10::str(" and ", flat.members.size() - i, " more");
      break;
    }
    names += (i ? ", '" : "'") + flat.members[i].name + "'";
  }
  return "[fully_shard] raw access to a sharded parameter of unit '" + flat.unit->name + "' (" + names +
         "): its data is on the ranks' shards and no operator is using it. Read it through a LibTorch operator "
         "(item(), clone(), ...), or open a scope with ShardedModel::full_parameters() first";
}

ResidentSet::ResidentSet(Engine& engine) : engine_(engine), share_(std::make_shared<FrameShare>()) {
  const auto device = engine.units().empty() ? c10::Device(c10::kCPU) : engine.units().front()->flats.front()->device;
  share_->pool = FramePool(
      engine.options().frames + engine.options().prefetch, largest_unit(engine), device,
      engine.options().comm_allocator);
  share_->sets = {this};
}

ResidentSet::~ResidentSet() {
  leave_share();
}

void ResidentSet::gather(Unit& unit) {
  start_gather(unit, *frame_for(unit, /*may_exceed=*/true), /*prefetch=*/false);
}

bool ResidentSet::prefetch(Unit& unit) {
  auto frame = frame_for(unit, /*may_exceed=*/false);
  if (frame) {
    start_gather(unit, std::move(*frame), /*prefetch=*/true);
    ++engine_.stats_.prefetched;
  }
  return frame.has_value();
}

void ResidentSet::gather_kept(Unit& unit) {
  unit.kept = true;
  start_gather(unit, unit.keep_storage ? own_frame(unit) : share_->pool.take_extra(unit.bytes), /*prefetch=*/false);
}

void ResidentSet::gather_exactly(Unit& unit) {
  gathers_exactly_ = true;
  try {
    gather_kept(unit);
  } catch (...) {
    gathers_exactly_ = false;
    throw;
  }
  gathers_exactly_ = false;
  finish_gather(unit);
}

Frame ResidentSet::own_frame(Unit& unit) {
  if (!unit.own_memory.defined()) {
    unit.own_memory = share_->pool.take_extra(unit.bytes).memory;
  }
  return {unit.own_memory, /*extra=*/true};
}

void ResidentSet::hold_in_place(Unit& unit) {
  unit.residence = Residence::kResident;
  unit.kept = true;
  add_held(unit, /*extra=*/false, 1);
}

std::optional<Frame> ResidentSet::frame_for(Unit& unit, bool may_exceed) {
  if (unit.keep_storage) {
    unit.kept = true;
    return own_frame(unit);
  }
  if (engine_.keeps(unit)) {
    unit.kept = true;
    return share_->pool.take_kept(unit.bytes);
  }
  if (auto frame = share_->pool.take_if_free()) {
    return frame;
  }
  if (Unit* evicted = victim(&unit, may_exceed ? -1 : engine_.order_.next_use(unit.index))) {
    ++engine_.stats_.evictions;
    reshard(*evicted);
    return share_->pool.take_if_free();
  }
  if (may_exceed && take_from_others()) {
    return share_->pool.take_if_free();
  }
  if (may_exceed) {
    return share_->pool.take_extra(unit.bytes);
  }
  return std::nullopt;
}

// The unit whose next use is farthest, then the one used longest ago (Belady's rule as far as the order is known).
Unit* ResidentSet::victim(const Unit* for_unit, std::int64_t needed_sooner_than) const {
  Unit* best = nullptr;
  std::int64_t best_next = -1;
  for (const auto& candidate : engine_.units()) {
    if (!candidate->frame || candidate->frame->extra || candidate->kept || candidate->held || candidate->pins > 0 ||
        (for_unit && candidate.get() == engine_.current_) || candidate.get() == for_unit) {
      continue;
    }
    const auto next = engine_.order_.next_use(candidate->index);
    // Where nothing is known of either, in a first step, the user has listed the one to gather; not in place of others
    // that were gathered ahead.
    const bool listed = next == UseOrder::kNever && needed_sooner_than == UseOrder::kNever;
    if (listed ? candidate->prefetched : next <= needed_sooner_than) {
      continue;
    }
    if (!best || next > best_next || (next == best_next && candidate->last_use < best->last_use)) {
      best = candidate.get();
      best_next = next;
    }
  }
  return best;
}

void ResidentSet::start_gather(Unit& unit, Frame frame, bool prefetch) {
  engine_.check_same_order("unshard", unit);
  engine_.event(prefetch ? "prefetch" : "unshard", unit);
  log::debug("{} unit '{}' {} bytes", prefetch ? "prefetch" : "unshard", unit.name, unit.bytes);
  ++engine_.stats_.unshards;
  add_held(unit, frame.extra, 1);
  unit.frame = std::move(frame);
  unit.prefetched = prefetch;
  unit.residence = Residence::kGathering;
  order_before_gather(unit);
  const auto& memory = unit.frame->memory;
  const auto begin = [&](FlatParameter& flat) {
    flat.storage->fill(memory, flat.frame_offset);
    const at::NoGradGuard no_grad;
    const bool near = flat.near_slice.defined();
    const ParameterGather request{
        unit.name, near ? flat.near_slice : engine_.stage_.take(flat),
        // A tensor of its own: a gather that is abandoned keeps the memory until the transport is done with it.
        memory.narrow(0, flat.frame_offset, flat.padded_bytes()).view(flat.dtype),
        near ? *unit.near_group : *unit.group, near};
    const auto& hook = engine_.options().gather_hook;
    const bool hooked = hook && !unit.whole && !gathers_exactly_;
    auto work = hooked ? hook(request) : gather_as_is(request);
    TORCH_CHECK_VALUE(
        work, "[fully_shard] expected gather_hook to return a Work for unit '", unit.name,
        "', got none; return what gather_as_is() does when there is nothing of your own to wait for");
    return work;
  };
  try {
    engine_.streams_.run(Lane::kGather, [&] {
      for (auto& flat : unit.flats) {
        unit.gathers.push_back(engine_.meter_.measure(begin(*flat)));
      }
    });
  } catch (...) {
    lose(unit); // or its frame would pass for a gathered one
    throw;
  }
  check_invariant();
}

void ResidentSet::order_before_gather(Unit& unit) {
  const auto& streams = engine_.streams_;
  if (!streams.any()) {
    return;
  }
  if (unit.shard_written) {
    streams.follow(Lane::kGather);
    for (const auto& other : engine_.units()) { // their writes were given to the same stream, and before this
      other->shard_written = false;
    }
  }
  if (!unit.frame->used.recorded()) { // its memory was the current stream's before
    streams.record(unit.frame->used);
  }
  streams.run(Lane::kGather, [&] {
    streams.wait(unit.frame->used);
    streams.wait(unit.near_ready);
  });
}

void ResidentSet::mark_used(Unit& unit) {
  if (unit.use_unmarked && unit.frame) {
    engine_.streams_.record(unit.frame->used);
  }
  unit.use_unmarked = false;
}

void ResidentSet::finish_gather(Unit& unit) {
  engine_.streams_.run(Lane::kGather, [&] {
    for (auto& gather : unit.gathers) {
      gather->wait();
      unreleased_.push_back(std::move(gather));
    }
    unit.gathers.clear();
    engine_.streams_.record(unit.ready);
  });
  engine_.streams_.wait(unit.ready);
  unit.use_unmarked = engine_.streams_.any(); // another model's lane may fill this frame next, read or not
  unit.residence = Residence::kResident;
  while (unreleased_.size() > kMaxUnreleased) {
    unreleased_.front()->release();
    unreleased_.erase(unreleased_.begin());
  }
}

void ResidentSet::release_gathers() {
  for (auto& gather : unreleased_) {
    gather->release();
  }
  unreleased_.clear();
}

void ResidentSet::lose(Unit& unit) {
  if (unit.residence == Residence::kGathering) {
    // The transport may still be writing into the frame: it goes with the works and does not come back to the pool.
    unit.gathers.clear();
    unit.residence = Residence::kResident;
    share_->pool.lose(*unit.frame);
    unit.own_memory = at::Tensor();
  }
  reshard(unit, /*keeps_near=*/false);
}

void ResidentSet::reshard(Unit& unit, bool keeps_near) {
  TORCH_INTERNAL_ASSERT(unit.pins == 0, "unit '", unit.name, "' is resharded while an operator uses it");
  if (unit.residence == Residence::kGathering) {
    finish_gather(unit);
  }
  if (!unit.frame) {
    return;
  }
  if (unit.prefetched) {
    ++engine_.stats_.mispredicted;
    unit.prefetched = false;
  }
  engine_.event("reshard", unit);
  if (keeps_near && unit.near_group && engine_.current_pass() == Pass::kForward) {
    keep_near_slice(unit);
  }
  mark_used(unit);
  log::debug("reshard unit '{}' {} bytes", unit.name, unit.bytes);
  for (auto& flat : unit.flats) {
    flat->storage->empty(no_data_message(*flat));
  }
  add_held(unit, unit.frame->extra, -1);
  unit.kept = false;
  unit.held = false;
  unit.residence = Residence::kSharded;
  share_->pool.give_back(std::move(*unit.frame));
  unit.frame.reset();
}

// After forward: 1/n of the unit stays here, from which n near ranks gather it again for backward.
void ResidentSet::keep_near_slice(Unit& unit) {
  const at::NoGradGuard no_grad;
  const auto n = unit.near_group->size();
  for (auto& flat : unit.flats) {
    if (!flat->near_slice.defined()) {
      const auto numel = flat->padded_numel / n;
      flat->near_slice = flat->flat.narrow(0, unit.near_group->rank() * numel, numel).clone();
      near_bytes_ += static_cast<std::int64_t>(flat->near_slice.nbytes());
      unit.use_unmarked = true;
    }
  }
  engine_.streams_.record(unit.near_ready);
}

void ResidentSet::drop_near_slices() {
  for (const auto& unit : engine_.units()) {
    drop_near_slice(*unit);
  }
}

void ResidentSet::drop_near_slice(Unit& unit) {
  if (unit.residence == Residence::kGathering) {
    finish_gather(unit); // of that slice
  }
  for (auto& flat : unit.flats) {
    if (flat->near_slice.defined()) {
      near_bytes_ -= static_cast<std::int64_t>(flat->near_slice.nbytes());
      flat->near_slice = at::Tensor();
    }
  }
}

at::Tensor ResidentSet::gather_full(FlatParameter& flat) {
  auto memory = at::empty({flat.padded_numel}, at::TensorOptions().dtype(flat.master_dtype).device(flat.device));
  engine_.streams_.follow(Lane::kGather);
  engine_.streams_.run(Lane::kGather, [&] {
    const auto shard = engine_.stage_.take(flat);
    const auto work = flat.unit->group->all_gather(memory, shard, flat.unit->name);
    work->wait();
    work->release();
  });
  engine_.streams_.join(Lane::kGather);
  const auto bytes = static_cast<std::int64_t>(memory.nbytes());
  held_bytes_ += bytes;
  kept_bytes_ += bytes;
  peak_held_bytes_ = std::max(peak_held_bytes_, held_bytes_);
  return memory;
}

void ResidentSet::give_back_full(const FlatParameter& flat) {
  const auto bytes = flat.padded_numel * static_cast<std::int64_t>(c10::elementSize(flat.master_dtype));
  held_bytes_ -= bytes;
  kept_bytes_ -= bytes;
}

void ResidentSet::abandon() {
  unreleased_.clear();
  for (const auto& unit : engine_.units()) {
    if (!unit->frame || unit->in_scope) {
      continue;
    }
    unit->pins = 0;
    lose(*unit);
  }
}

void ResidentSet::add_held(const Unit& unit, bool extra, std::int64_t sign) {
  held_bytes_ += sign * unit.bytes;
  peak_held_bytes_ = std::max(peak_held_bytes_, held_bytes_);
  if (unit.kept) {
    kept_bytes_ += sign * unit.bytes;
  } else if (extra) {
    extra_bytes_ += sign * unit.bytes;
  }
}

Residency ResidentSet::residency() const {
  return {held_bytes_, peak_held_bytes_, num_frames() * frame_bytes(), extra_bytes_, kept_bytes_, near_bytes_};
}

void ResidentSet::check_invariant() const {
#ifdef EBB_CHECK_INVARIANTS
  const auto allowed = num_frames() * frame_bytes() + extra_bytes_ + kept_bytes_;
  TORCH_INTERNAL_ASSERT(
      held_bytes_ <= allowed, "unsharded parameters hold ", held_bytes_, " bytes, more than the ", allowed,
      " of frames, pinned and kept units");
#endif
}

} // namespace ebb::shard
