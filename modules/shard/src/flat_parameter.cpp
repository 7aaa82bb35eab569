#include "flat_parameter.h"

#include "dispatch.h"
#include "offload.h"
#include "resident_set.h"
#include "unit.h"

#include <torch/torch.h>

#include <algorithm>
#include <numeric>

namespace ebb::shard {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Note [Sentinel gradients]
// An optimizer built on model->parameters() would find no gradients there and silently do nothing. So each parameter's
// grad is, between steps, a tensor without data whose access throws: such an optimizer stops at its first step. A hook
// takes it away before autograd accumulates the next gradient.
at::Tensor make_sentinel(const Member& member, const FlatParameter& flat) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), member.numel * flat.element_size(), c10::DataPtr(nullptr, flat.device),
      /*allocator=*/nullptr,
      /*resizable=*/false);
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(
      "[fully_shard] the gradient of '" + member.name + "' (unit '" + flat.unit->name +
      "') is in the shards, not on the model's parameter: build the optimizer on the parameters() of the ShardedModel, "
      "and clip with its clip_grad_norm_()");
  return tensor_on(c10::Storage(std::move(storage)), /*paged=*/false, flat.dtype, 0, member.sizes, member.strides);
}

} // namespace

// Strides are part of a model: a channels-last weight makes convolutions take the channels-last kernels and give their
// bits. So the elements stay in the order they have in memory.
void Member::take_shape(const at::Tensor& tensor) {
  sizes = tensor.sizes().vec();
  numel = tensor.numel();
  strides = dense_strides(tensor);
  if (!tensor.is_contiguous() && tensor.is_non_overlapping_and_dense()) {
    dim_order.resize(sizes.size());
    std::iota(dim_order.begin(), dim_order.end(), 0);
    std::stable_sort(dim_order.begin(), dim_order.end(), [this](auto a, auto b) { return strides[a] > strides[b]; });
  }
}

at::Tensor Member::in_shape(const at::Tensor& flat) const {
  return flat.as_strided(sizes, strides, flat.storage_offset() + offset);
}

at::Tensor Member::in_memory_order(const at::Tensor& values) const {
  return dim_order.empty() ? values.reshape({-1}) : values.permute(dim_order).reshape({-1});
}

void FlatParameter::lay_out(int rank, int world_size) {
  std::int64_t end = 0;
  for (auto& member : members) {
    member.offset = round_up(end, kAlignment);
    end = member.offset + member.numel;
  }
  shard_numel = round_up((end + world_size - 1) / world_size, kAlignment);
  padded_numel = shard_numel * world_size;
  const auto begin = rank * shard_numel;
  for (auto& member : members) {
    member.slice_begin = std::clamp<std::int64_t>(begin - member.offset, 0, member.numel);
    member.slice_end = std::clamp<std::int64_t>(begin + shard_numel - member.offset, 0, member.numel);
  }
}

at::Tensor FlatParameter::zeros(c10::ScalarType dtype) const {
  return tier ? tier->zeros(shard_numel, dtype) : at::zeros({shard_numel}, at::TensorOptions(dtype).device(device));
}

void FlatParameter::fill(const Member& member, const at::Tensor& values, int rank) {
  const at::NoGradGuard no_grad;
  const auto length = member.slice_end - member.slice_begin;
  if (length > 0) {
    shard.narrow(0, member.offset + member.slice_begin - rank * shard_numel, length)
        .copy_(member.in_memory_order(values).narrow(0, member.slice_begin, length));
  }
}

void FlatParameter::take_over(int rank, bool in_place) {
  const at::NoGradGuard no_grad;
  const OwnAccess own;
  const auto begin = rank * shard_numel;
  if (!shard.defined()) { // member by member, so that no copy of the whole unit is ever made
    shard = zeros(master_dtype);
    for (auto& member : members) {
      fill(member, member.parameter, rank);
    }
  }

  auto shard_storage = c10::make_intrusive<PagedStorage>(owner, PageKind::kShard, shard_bytes(), shard.device());
  shard_storage->fill(shard.view(at::kByte), 0);

  storage = c10::make_intrusive<PagedStorage>(owner, PageKind::kUnsharded, padded_bytes(), device);
  if (in_place) {
    storage->fill(shard.view(at::kByte), 0);
  }
  flat = tensor_on(c10::Storage(storage), /*paged=*/false, dtype, 0, {padded_numel});
  for (auto& member : members) {
    const auto length = member.slice_end - member.slice_begin;
    const auto offset = length > 0 ? member.offset + member.slice_begin - begin : 0;
    member.leaf = tensor_on(c10::Storage(shard_storage), /*paged=*/true, master_dtype, offset, {length})
                      .set_requires_grad(requires_grad);
    member.parameter.mutable_grad() = at::Tensor();
    if (requires_grad) {
      member.sentinel = make_sentinel(member, *this);
    }
  }
  point_parameters_at(storage, dtype);
}

void FlatParameter::compute_in(c10::ScalarType as) {
  storage->empty(
      "[set_full_precision] the precision of unit '" + unit->name +
      "' was switched between a forward and its backward; switch it after the backward");
  dtype = as;
  storage = c10::make_intrusive<PagedStorage>(owner, PageKind::kUnsharded, padded_bytes(), device);
  storage->empty(no_data_message(*this));
  flat = tensor_on(c10::Storage(storage), /*paged=*/false, dtype, 0, {padded_numel});
  point_parameters_at(storage, dtype);
}

void FlatParameter::point_parameters_at(const c10::intrusive_ptr<PagedStorage>& other, c10::ScalarType as) {
  const OwnAccess own;
  for (auto& member : members) {
    // Keeps the handle, its autograd identity and every alias of the handle; drops the bytes it had.
    member.parameter.set_data(
        tensor_on(c10::Storage(other), /*paged=*/true, as, member.offset, member.sizes, member.strides));
  }
}

const Member* FlatParameter::member_at(std::int64_t offset) const {
  auto after = std::upper_bound(members.begin(), members.end(), offset, [](std::int64_t value, const Member& member) {
    return value < member.offset;
  });
  if (after == members.begin()) {
    return nullptr;
  }
  --after;
  return offset < after->offset + std::max<std::int64_t>(after->numel, 1) ? &*after : nullptr;
}

} // namespace ebb::shard
