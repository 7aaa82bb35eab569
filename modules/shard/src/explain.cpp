#include "ebb/shard/fully_shard.h"
#include "engine.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>

namespace ebb::shard {
namespace {

std::string dtypes_text(const FlatParameter& flat) {
  std::string text = c10::toString(flat.dtype);
  if (flat.is_mixed()) {
    text += fmt::format(" from {}", c10::toString(flat.master_dtype));
  }
  if (flat.requires_grad && (flat.reduce_dtype != flat.dtype || flat.grad_dtype != flat.dtype)) {
    text +=
        fmt::format(", reduced in {}, gradients {}", c10::toString(flat.reduce_dtype), c10::toString(flat.grad_dtype));
  }
  return text;
}

std::string bytes_text(std::int64_t bytes) {
  return bytes < 10'000       ? fmt::format("{} B", bytes)
         : bytes < 10'000'000 ? fmt::format("{:.1f} kB", bytes / 1e3)
                              : fmt::format("{:.1f} MB", bytes / 1e6);
}

// Retries are allocations that failed until the cache was emptied, at the price of waiting for the device.
std::string device_text(c10::Device device) {
  if (device.is_cpu()) {
    return "";
  }
  const auto index = device.has_index() ? device.index() : c10::DeviceIndex{0};
  const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(index);
  const auto peak = [](const auto& stat) { return bytes_text(stat[0].peak); }; // of all sizes
  return fmt::format(
      "  {}: peaks of {} allocated, {} active, {} reserved; {} allocations had to be retried\n", device.str(),
      peak(stats.allocated_bytes), peak(stats.active_bytes), peak(stats.reserved_bytes), stats.num_alloc_retries);
}

std::string measured_text(const ShardStats& stats, const Residency& residency, c10::Device device) {
  auto text = fmt::format(
      "  measured: {} gathers ({} ahead, {} of these for nothing), {} reductions; unsharded parameters held {} at the "
      "peak, {} is the allowance of the frames\n",
      stats.unshards, stats.prefetched, stats.mispredicted, stats.reduces, bytes_text(residency.peak_held_bytes),
      bytes_text(residency.frame_bytes));
  if (stats.comm_seconds > 0) {
    text += fmt::format(
        "  communication: under way for {:.3g} s, of which this rank waited {:.3g} s; {:.0f} % was hidden behind "
        "compute\n",
        stats.comm_seconds, stats.wait_seconds, 100 * std::max(0.0, 1 - stats.wait_seconds / stats.comm_seconds));
  }
  return text + device_text(device);
}

} // namespace

std::string ShardedModel::explain() const {
  const auto& engine = *engine_;
  const auto& options = engine.options();
  std::int64_t total = 0;
  std::int64_t trainable = 0;
  std::int64_t shard_bytes = 0;
  std::int64_t largest = 0;
  std::int64_t buffers = 0;
  std::int64_t kept = 0;
  std::int64_t largest_shard = 0;
  const Unit* largest_unit = nullptr;
  for (const auto& unit : engine.units()) {
    total += unit->bytes;
    buffers = std::max(buffers, engine.max_reduce_buffers() * unit->reduce_bytes);
    if (unit->bytes > largest) {
      largest = unit->bytes;
      largest_unit = unit.get();
    }
    std::int64_t unit_shard = 0;
    for (const auto& flat : unit->flats) {
      unit_shard += flat->shard_bytes();
      largest_shard = std::max(largest_shard, unit_shard);
      shard_bytes += flat->shard_bytes();
      kept += !unit->whole && !unit->reshard_after_forward ? flat->padded_bytes() : 0;
      trainable += flat->requires_grad ? flat->shard_bytes() : 0;
    }
  }
  std::string text = fmt::format(
      "{} over {} rank(s): {} parameters in {} unit(s)\n", name_of(options.strategy), engine.group().size(),
      num_parameters(), engine.units().size());
  text += fmt::format("  {:<28} {:>12} {:>12} {:>12}  {}\n", "unit", "parameters", "unsharded", "shard", "dtypes");
  for (const auto& unit : engine.units()) {
    std::int64_t numel = 0;
    std::int64_t shard = 0;
    std::string dtypes;
    for (const auto& flat : unit->flats) {
      for (const auto& member : flat->members) {
        numel += member.numel;
      }
      shard += flat->shard_bytes();
      dtypes +=
          fmt::format("{}{}{}", dtypes.empty() ? "" : ", ", dtypes_text(*flat), flat->requires_grad ? "" : " (frozen)");
    }
    text += fmt::format(
        "  {:<28} {:>12} {:>12} {:>12}  {}\n", unit->name, numel, bytes_text(unit->bytes), bytes_text(shard), dtypes);
  }
  const bool gathers =
      std::any_of(engine.units().begin(), engine.units().end(), [](const auto& unit) { return !unit->in_place; });
  const auto num_frames = gathers ? engine.num_frames() : 0;
  const auto frames = num_frames * engine.frame_bytes();
  text += fmt::format(
      "  frames: {} ({} + {} prefetch) of {}\n", num_frames, options.frames, options.prefetch,
      bytes_text(engine.frame_bytes()));
  text += fmt::format(
      "  expected peak on this rank without activations: {} = shards {} + gradients {} + AdamW state {} + frames {}{} "
      "+ reduce buffers {}\n",
      bytes_text(shard_bytes + 3 * trainable + frames + kept + buffers), bytes_text(shard_bytes), bytes_text(trainable),
      bytes_text(2 * trainable), bytes_text(frames), kept ? " + kept units " + bytes_text(kept) : std::string(),
      bytes_text(buffers));
  if (engine.tier()) {
    text += fmt::format(
        "  offload: of these, {} of shards, gradients and AdamW state are in {}; {} of copies of shards come beside "
        "the frames\n",
        bytes_text(shard_bytes + 3 * trainable), engine.tier()->describe(),
        bytes_text((options.prefetch + 1) * largest_shard));
  }
  if (largest_unit && total > 0 && largest > total * 0.6 && options.strategy != Strategy::kNoShard &&
      engine.group().size() > 1) {
    text += fmt::format(
        "  warning: unit '{}' holds {:.0f}% of the parameters, so that little memory is saved; choose a wrap policy "
        "that makes its parts units, for example wrap_by_class({{\"Block\"}}) or a smaller wrap_by_size()\n",
        largest_unit->name, 100.0 * largest / total);
  }
  const auto stats = engine.stats();
  if (stats.unshards + stats.reduces > 0) {
    text += measured_text(stats, engine.residency(), engine.units().front()->flats.front()->device);
  }
  return text;
}

} // namespace ebb::shard
