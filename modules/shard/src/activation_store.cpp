#include "activation_store.h"

#include "op_results.h"
#include "paged_storage.h"

#include <torch/torch.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace ebb::shard {

ActivationOffload::ActivationOffload(ActivationOffloadOptions options) {
  TORCH_CHECK_VALUE(
      options.min_bytes >= 0, "[ActivationOffload] expected min_bytes of at least 0, got ", options.min_bytes);
  store_ = std::make_shared<ActivationStore>(std::move(options));
}

ActivationOffload::~ActivationOffload() = default;

ActivationOffloadStats ActivationOffload::stats() const {
  return store_->stats();
}

SavedActivation::~SavedActivation() {
  store->forget(*this);
}

std::shared_ptr<SavedActivation> ActivationStore::save(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != c10::kStrided || tensor.is_meta() || is_without_memory(tensor) ||
      PagedStorage::of(tensor) ||
      static_cast<std::int64_t>(tensor.nbytes()) < std::max<std::int64_t>(options_.min_bytes, 1)) {
    return nullptr;
  }
  const at::NoGradGuard no_grad;
  const std::lock_guard lock(mutex_);
  if (!tier_) {
    tier_ = std::make_unique<Tier>(options_.policy, tensor.device(), "ActivationOffload");
  }
  if (!order_.empty()) { // one on its way is enough: two would be in memory for nothing
    settle(*order_.back());
  }
  auto saved = std::make_shared<SavedActivation>();
  saved->sizes = tensor.sizes().vec();
  saved->strides = dense_strides(tensor);
  saved->options = tensor.options().requires_grad(false);
  auto place = tier_->zeros(tensor.numel(), tensor.scalar_type()).as_strided(saved->sizes, saved->strides);
  saved->source = tensor.detach();
  saved->version = saved->source._version();
  saved->leaving = tier_->store(place, saved->source);
  saved->place = std::move(place);
  stats_.stored_bytes += static_cast<std::int64_t>(tensor.nbytes());
  stats_.live_bytes += static_cast<std::int64_t>(tensor.nbytes());
  saved->position = order_.insert(order_.end(), saved.get());
  saved->store = shared_from_this(); // from here on it is to be forgotten
  return saved;
}

at::Tensor ActivationStore::take(SavedActivation& saved, bool last) {
  const at::NoGradGuard no_grad;
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_VALUE(
      saved.place.defined(),
      "[checkpoint] backward goes through this graph a second time, but its offloaded inputs are gone after the first; "
      "pass retain_graph=true to the first backward");
  if (!last) {
    settle(saved);
  }
  at::Tensor values;
  if (saved.source.defined()) { // still here: the last of forward is the first of backward
    note_writes(saved);
    values = saved.source;
  } else if (!saved.overwritten) {
    if (!saved.back.defined()) {
      fetch(saved);
    }
    auto back = std::exchange(saved.back, at::Tensor());
    std::exchange(saved.returning, nullptr)->wait();
    values = std::move(back);
  }
  TORCH_CHECK_VALUE(
      !saved.overwritten, "[checkpoint] an input ", at::IntArrayRef(saved.sizes),
      " of a checkpointed function was written to in place after the call, while it was on its way to the tier; "
      "write to a clone of it instead");
  fetch_before(saved);
  if (last) {
    drop(saved);
  }
  return values;
}

ActivationOffloadStats ActivationStore::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void ActivationStore::forget(SavedActivation& saved) {
  const std::lock_guard lock(mutex_);
  drop(saved);
}

void ActivationStore::drop(SavedActivation& saved) {
  if (!saved.place.defined()) {
    return;
  }
  stats_.live_bytes -= static_cast<std::int64_t>(saved.place.nbytes());
  order_.erase(saved.position);
  saved.leaving = saved.returning = nullptr;
  saved.place = saved.source = saved.back = at::Tensor();
}

void ActivationStore::note_writes(SavedActivation& saved) {
  saved.overwritten = saved.overwritten || saved.source._version() != saved.version;
}

void ActivationStore::settle(SavedActivation& saved) {
  if (const auto leaving = std::exchange(saved.leaving, nullptr)) {
    leaving->wait(); // a copy that fails leaves the source where it is: nothing is lost
    note_writes(saved);
    saved.source = at::Tensor();
  }
}

void ActivationStore::fetch(SavedActivation& saved) {
  saved.back = at::empty_strided(saved.sizes, saved.strides, saved.options);
  saved.returning = tier_->fetch(saved.back, saved.place);
  stats_.fetched_bytes += static_cast<std::int64_t>(saved.back.nbytes());
  ++stats_.fetched;
}

void ActivationStore::fetch_before(const SavedActivation& saved) {
  if (saved.position == order_.begin()) {
    return;
  }
  auto& before = **std::prev(saved.position);
  if (!before.source.defined() && !before.back.defined() && !before.overwritten) {
    fetch(before);
    ++stats_.fetched_ahead;
  }
}

} // namespace ebb::shard
