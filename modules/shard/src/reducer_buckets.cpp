#include "ebb/comm/mesh.h"
#include "flat_parameter.h"
#include "module_tree.h"
#include "paged_storage.h"
#include "reducer.h"
#include "sync.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <unordered_set>

namespace ebb::shard {

Reducer::Bucket::Bucket() : released(c10::intrusive_ptr<c10::StorageImpl>()) {}

Reducer::Reducer(ReplicateOptions options, const ModuleTree& tree)
    : options_(std::move(options)), group_(options_.mesh.world()), model_buffers_(tree.buffers) {
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& node : tree.nodes) {
    for (const auto& [name, tensor] : node.parameters) {
      if (seen.insert(tensor.unsafeGetTensorImpl()).second) {
        parameters_.emplace_back(name, tensor);
        trained_.push_back(tensor.requires_grad());
      }
    }
  }
  plan_buckets();
  if (options_.skip_unused && group_->size() > 1) {
    vote_group_ = comm::Mesh(group_).shard_neighbours(group_->size());
  }
}

void Reducer::plan_buckets() {
  const auto& delayed = options_.delayed_parameters;
  const auto& list = options_.bucket_bytes_list;
  std::vector<Bucket> last;
  std::int64_t bytes = 0;
  const auto add = [&](std::vector<Bucket>& buckets, const std::string& name, const at::Tensor& tensor, bool own) {
    const auto index = buckets.empty() ? 0 : buckets.size() - 1;
    const auto limit = !list.empty() ? list[std::min(index, list.size() - 1)]
                       : index == 0  ? options_.first_bucket_bytes
                                     : options_.bucket_bytes;
    const auto size = static_cast<std::int64_t>(tensor.nbytes());
    const bool fits = !buckets.empty() && (own || bytes + size <= limit) &&
                      buckets.back().slots.front().parameter.scalar_type() == tensor.scalar_type() &&
                      buckets.back().slots.front().parameter.device() == tensor.device();
    if (!fits) {
      buckets.emplace_back();
      buckets.back().name = fmt::format("from '{}'", name);
      bytes = 0;
    }
    auto& bucket = buckets.back();
    bucket.slots.emplace_back();
    bucket.slots.back().name = name;
    bucket.slots.back().parameter = tensor;
    bucket.slots.back().offset = bucket.numel;
    bucket.numel += (tensor.numel() + kAlignment - 1) / kAlignment * kAlignment;
    bytes += size;
    ++num_slots_;
  };
  for (const bool delays : {false, true}) {
    for (auto it = parameters_.rbegin(); it != parameters_.rend(); ++it) {
      const auto& [name, tensor] = *it;
      if (tensor.requires_grad() && (std::find(delayed.begin(), delayed.end(), name) != delayed.end()) == delays) {
        add(delays ? last : buckets_, name, tensor, delays);
      }
    }
  }
  auto place = buckets_.end();
  if (!options_.delay_until.empty()) {
    place = std::find_if(buckets_.begin(), buckets_.end(), [&](const Bucket& bucket) {
      return std::any_of(bucket.slots.begin(), bucket.slots.end(), [&](const Slot& slot) {
        return slot.name == options_.delay_until;
      });
    });
    place += place == buckets_.end() ? 0 : 1; // it may be frozen
  }
  buckets_.insert(place, std::make_move_iterator(last.begin()), std::make_move_iterator(last.end()));
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    buckets_[i].name = fmt::format("bucket {} {}", i, buckets_[i].name);
    if (!options_.lazy_bucket_allocation) {
      make_memory(buckets_[i]);
    }
  }
}

void Reducer::make_memory(Bucket& bucket) const {
  const auto& first = bucket.slots.front().parameter;
  if (auto kept = bucket.released.lock()) { // somebody kept the gradients: they go on there
    bucket.memory = tensor_on(c10::Storage(std::move(kept)), /*paged=*/false, first.scalar_type(), 0, {bucket.numel});
    bucket.released.reset();
  } else {
    bucket.memory = at::zeros({bucket.numel}, first.options().requires_grad(false));
  }
  for (auto& slot : bucket.slots) {
    const auto& like = slot.parameter;
    slot.grad = tensor_on(
        bucket.memory.storage(), /*paged=*/false, like.scalar_type(), slot.offset, like.sizes(), dense_strides(like));
  }
}

void Reducer::release_memory(Bucket& bucket) const {
  if (!bucket.memory.defined()) {
    return;
  }
  auto storage = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(bucket.memory.storage().unsafeGetStorageImpl());
  bucket.released = c10::weak_intrusive_ptr<c10::StorageImpl>(storage);
  bucket.memory = at::Tensor();
  for (auto& slot : bucket.slots) {
    slot.grad = at::Tensor();
  }
}

void Reducer::sync_buffers() {
  broadcast_buffers_from_rank0(model_buffers_, *group_);
}

std::string Reducer::explain() const {
  const auto bytes_of = [](const Bucket& bucket) {
    return static_cast<double>(bucket.numel * static_cast<std::int64_t>(bucket.slots.front().parameter.element_size()));
  };
  double bytes = 0;
  for (const auto& bucket : buckets_) {
    bytes += bytes_of(bucket);
  }
  auto text = fmt::format(
      "replicate over {} rank(s): {} tensors, gradients of {:.1f} MB in {} bucket(s)\n", group_->size(),
      parameters_.size(), bytes / 1e6, buckets_.size());
  for (const auto& bucket : buckets_) {
    text +=
        fmt::format("  {:<48} {:>4} tensors {:>10.1f} kB\n", bucket.name, bucket.slots.size(), bytes_of(bucket) / 1e3);
  }
  return text;
}

} // namespace ebb::shard
