#include "streams/stream_books.h"

#include <torch/torch.h>

namespace ebb::shard::test {

std::string Hazard::text() const {
  return then + (kind == Kind::kReadBeforeWrite ? " may read before " : " may reuse before ") + first;
}

std::optional<Range> range_of(const at::Tensor& tensor, bool write) {
  if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->has_storage() || tensor.numel() == 0) {
    return std::nullopt;
  }
  auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  const auto begin = reinterpret_cast<std::uintptr_t>(storage->_mutable_data_ptr_no_checks().get());
  if (begin == 0) {
    return std::nullopt;
  }
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    last += (tensor.size(i) - 1) * tensor.stride(i);
  }
  const auto item = static_cast<std::int64_t>(tensor.itemsize());
  return Range{
      begin + tensor.storage_offset() * item, begin + (tensor.storage_offset() + last + 1) * item, begin,
      begin + storage->nbytes(), write};
}

StreamBooks*& StreamBooks::here() {
  thread_local StreamBooks* books = nullptr;
  return books;
}

int StreamBooks::new_stream(const std::string& name) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(names_.size() < kMostStreams, "more streams than a vector clock has");
  names_.push_back(name);
  return static_cast<int>(names_.size()) - 1;
}

int StreamBooks::take_from_pool() {
  static const std::array<std::string, 3> names{"gather", "reduce", "copy"};
  const auto i = taken_++;
  return new_stream(i < names.size() ? names[i] : "pool " + std::to_string(i));
}

void StreamBooks::record(RecordedEvent& event, int stream) {
  const std::lock_guard lock(mutex_);
  event = {reach(stream), stream};
}

void StreamBooks::wait(int waiter, const RecordedEvent& event) {
  const std::lock_guard lock(mutex_);
  ++waits[{names_[waiter], names_[event.source]}];
  if (ignored.contains({names_[waiter], names_[event.source]}) || num_waits++ == ignored_wait) {
    return;
  }
  clocks_[waiter].join(event.clock);
}

void StreamBooks::allocate(void* data, std::size_t size) {
  const std::lock_guard lock(mutex_);
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  for (auto old = blocks_.lower_bound(begin); old != blocks_.end() && old->first < begin + size;) {
    old = blocks_.erase(old); // the host's, of memory that was given back meanwhile
  }
  if (const auto* old = find(begin); old && old->home == kHost) {
    blocks_.erase(std::prev(blocks_.upper_bound(begin)));
  }
  // What the stream did before may have been to the same memory.
  blocks_[begin] = {
      begin + size,
      current_,
      {{begin, begin + size, current_, reach(current_).ticks[current_], true, "the memory's last life"}}};
}

void StreamBooks::free(void* data) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(reinterpret_cast<std::uintptr_t>(data));
  if (found != blocks_.end()) {
    check(found->second, {found->first, found->second.end, 0, 0, true}, found->second.home, "the memory's next life");
    blocks_.erase(found);
  }
}

bool StreamBooks::on_device(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  const auto range = range_of(tensor, false);
  const auto* block = range ? find(range->begin) : nullptr;
  return block && block->home != kHost;
}

void StreamBooks::work(const std::string& op, const std::vector<Range>& ranges, int stream) {
  const std::lock_guard lock(mutex_);
  if (!ranges.empty()) {
    ++num_operators;
    use(op, ranges, stream);
  }
}

void StreamBooks::operate(const std::string& op, const std::vector<Range>& ranges, bool non_blocking, bool host_reads) {
  const std::lock_guard lock(mutex_);
  std::vector<Range> device;
  std::vector<Range> host;
  for (const auto& range : ranges) {
    const auto* block = find(range.begin);
    (block && block->home != kHost ? device : host).push_back(range);
  }
  if (non_blocking) {
    device.insert(device.end(), host.begin(), host.end());
    host.clear();
  }
  if (!device.empty()) {
    ++num_operators;
    use(op, device, current_);
    if (!host.empty() || host_reads) {
      ++waits[{"host", names_[current_]}];
      clocks_[kHost].join(clocks_[current_]);
    }
  }
  if (!host.empty()) {
    use(op, host, kHost);
  }
}

// The clock of what `stream` is given next: after all that the host has seen.
VectorClock& StreamBooks::reach(int stream) {
  clocks_[stream].join(clocks_[kHost]);
  return clocks_[stream];
}

Owned* StreamBooks::find(std::uintptr_t at) {
  auto after = blocks_.upper_bound(at);
  if (after == blocks_.begin()) {
    return nullptr;
  }
  --after;
  return at < after->second.end ? &after->second : nullptr;
}

void StreamBooks::check(const Owned& block, const Range& range, int stream, const std::string& op) {
  const auto& clock = reach(stream);
  for (const auto& before : block.accesses) {
    if (before.begin >= range.end || range.begin >= before.end || !(before.write || range.write) ||
        clock.ticks[before.stream] >= before.tick) {
      continue;
    }
    const auto kind = before.write && !range.write ? Hazard::Kind::kReadBeforeWrite : Hazard::Kind::kReuseBeforeLastUse;
    Hazard hazard{kind, before.op + " on " + names_[before.stream], op + " on " + names_[stream]};
    if (seen_.emplace(hazard.kind, hazard.first, hazard.then).second) {
      hazards_.push_back(std::move(hazard));
    }
  }
}

void StreamBooks::use(const std::string& op, const std::vector<Range>& ranges, int stream) {
  const auto tick = ++reach(stream).ticks[stream];
  for (const auto& range : ranges) {
    auto* block = find(range.begin);
    if (!block) {
      block = &(blocks_[range.storage_begin] = {range.storage_end, kHost, {}});
    }
    check(*block, range, stream, op);
    std::erase_if(block->accesses, [&](const Access& old) {
      const bool inside = range.begin <= old.begin && old.end <= range.end;
      return inside && (range.write || (!old.write && old.stream == stream));
    });
    block->accesses.push_back({range.begin, range.end, stream, tick, range.write, op});
  }
}

std::vector<Hazard> StreamBooks::hazards() const {
  const std::lock_guard lock(mutex_);
  return hazards_;
}

} // namespace ebb::shard::test
