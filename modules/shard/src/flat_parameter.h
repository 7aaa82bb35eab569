#pragma once

#include "ebb/base/shard_layout.h"
#include "paged_storage.h"

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace ebb::shard {

class Tier;

struct Unit;

/// One original parameter inside a flat parameter.
struct Member {
  std::string name; ///< Fully qualified; the first of its names when tied.
  std::vector<std::string> tied_names; ///< Its other names.
  at::Tensor parameter; ///< The model's own handle; its storage is the flat parameter's paged storage.
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides; ///< Those it had; contiguous ones where it had gaps or overlaps.
  std::vector<std::int64_t> dim_order; ///< As in ShardLayout: empty for row-major.
  std::int64_t numel = 0;
  std::int64_t offset = 0; ///< First element within the flat parameter.

  std::int64_t slice_begin = 0; ///< This rank's part, in elements of the parameter; empty when begin == end.
  std::int64_t slice_end = 0;
  at::Tensor leaf; ///< The slice as a leaf: a view of the flat shard. What optimizers see.

  // Gradient state of one backward.
  at::Tensor pending; ///< Complete on this rank, not yet copied into the unit's reduce buffer.
  bool filled = false; ///< Copied into the reduce buffer.
  bool used = false; ///< Received a gradient in this backward.
  bool unsynced = false; ///< Received one in a backward before that was not reduced.
  at::Tensor sentinel; ///< Stands in the model's grad between steps; see Note [Sentinel gradients].

  /// Takes sizes, strides and their order from `tensor`.
  void take_shape(const at::Tensor& tensor);
  /// Its part of `flat`, a whole flat parameter or a buffer laid out like one, in its own shape and strides.
  at::Tensor in_shape(const at::Tensor& flat) const;
  /// All of `values`, of its shape, one behind the other in memory order.
  at::Tensor in_memory_order(const at::Tensor& values) const;
};

// Note [Flat parameter layout]
// The members lie one behind the other, each in its memory order and from a multiple of kAlignment elements, so that a
// gathered parameter is aligned as LibTorch's allocator would have aligned it: kernels that choose their path by alignment
// then give the same bits as without ebb. The whole is padded to world_size equal chunks; rank r's shard is chunk r.
inline constexpr std::int64_t kAlignment = 16;

/// The parameters of one unit that share a dtype and requires_grad: gathered into one buffer, reduced as one.
struct FlatParameter {
  Unit* unit = nullptr;
  c10::ScalarType dtype = c10::ScalarType::Float; ///< As operators see it and as it is gathered.
  c10::ScalarType param_dtype = c10::ScalarType::Float; ///< That of `dtype` but where full precision is switched on.
  c10::ScalarType master_dtype = c10::ScalarType::Float; ///< Of the shards.
  c10::ScalarType reduce_dtype = c10::ScalarType::Float;
  c10::ScalarType grad_dtype = c10::ScalarType::Float; ///< Of gradients on the shards.
  c10::Device device = c10::kCPU;
  bool requires_grad = true;
  std::vector<Member> members;
  std::int64_t padded_numel = 0;
  std::int64_t shard_numel = 0;
  std::int64_t frame_offset = 0; ///< Bytes from the start of the unit's frame.
  std::int64_t reduce_offset = 0; ///< Bytes from the start of the unit's reduce buffer.

  std::shared_ptr<Tier> tier; ///< Where shard and gradients are, when not on the device.
  std::shared_ptr<PageOwner> owner;
  c10::intrusive_ptr<PagedStorage> storage; ///< Under the model's parameters.
  at::Tensor flat; ///< All of `storage`, without the key and with a version counter of its own.
  at::Tensor shard; ///< [shard_numel], without the key; the leaves are on the same bytes. With kNoShard the whole.
  at::Tensor flat_grad; ///< [shard_numel]; the members' grads are views of it. Undefined until the first backward.
  at::Tensor unsynced; ///< [padded_numel] in reduce_dtype: gradients of backwards that were not reduced.
  at::Tensor partial; ///< [shard_numel] in reduce_dtype: summed over the shard axis, not yet over copies.
  bool collected = false; ///< flat_grad has reduced gradients that the members do not show yet.
  // Inside a full-parameter scope.
  at::Tensor full; ///< [padded_numel] in master_dtype: the values, where the unit's frame does not hold them.
  at::Tensor full_grad; ///< [padded_numel]; the parameters' grads are views of it.
  at::Tensor saved; ///< Of a unit in place: the values to go back to.
  at::Tensor near_slice; ///< Between forward and backward, with an integer reshard_after_forward: 1/n of the whole.

  bool is_mixed() const {
    return dtype != master_dtype;
  }
  std::int64_t element_size() const {
    return static_cast<std::int64_t>(c10::elementSize(dtype));
  }
  std::int64_t padded_bytes() const {
    return padded_numel * element_size();
  }
  std::int64_t reduce_bytes() const {
    return padded_numel * static_cast<std::int64_t>(c10::elementSize(reduce_dtype));
  }
  std::int64_t shard_bytes() const {
    return shard_numel * static_cast<std::int64_t>(c10::elementSize(master_dtype));
  }

  /// Offsets and slices for `rank` of `world_size`; from the members' numel.
  void lay_out(int rank, int world_size);

  /// Zeros of the shard's size where the shard is.
  at::Tensor zeros(c10::ScalarType dtype) const;
  /// Copies this rank's part of `values`, all of the member, into the shard.
  void fill(const Member& member, const at::Tensor& values, int rank);
  /// Puts the paged storage under the model's parameters, whose bytes go, and makes the leaves. `in_place`: the shard is
  /// the whole and the model's parameters are on it (kNoShard).
  void take_over(int rank, bool in_place);

  /// Other bytes, in another dtype, under the model's parameters. What autograd has saved of the old ones cannot be used.
  void compute_in(c10::ScalarType as);

  /// Puts the model's parameters on `storage`, at the members' offsets, in `as`.
  void point_parameters_at(const c10::intrusive_ptr<PagedStorage>& other, c10::ScalarType as);

  /// The member at element `offset` of the flat parameter, or nullptr (padding).
  const Member* member_at(std::int64_t offset) const;
};

} // namespace ebb::shard
