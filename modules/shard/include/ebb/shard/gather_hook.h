#pragma once

#include "ebb/comm/communicator.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>

namespace ebb::shard {

/// One all-gather that a GatherHook is asked to make.
struct ParameterGather {
  std::string unit;
  /// [n], this rank's part of one of the unit's flat parameters, in the shards' dtype; when `again`, in the output's. Not
  /// to be written.
  at::Tensor shard;
  at::Tensor output; ///< [n x size()], all parts in rank order, in the dtype that operators see.
  comm::Communicator& group;
  /// `shard` is what an integer reshard_after_forward has kept: values that a gather has delivered before.
  bool again = false;
};

/// Starts an all-gather in its own way, on all ranks alike; the Work ends it. FSDP2's set_custom_all_gather(). Not asked
/// for units that are whole on every rank, nor by full_parameters(), which gathers exactly.
using GatherHook = std::function<std::unique_ptr<comm::Work>(const ParameterGather&)>;

/// What happens without a hook.
std::unique_ptr<comm::Work> gather_as_is(const ParameterGather& gather);

/// How parameters look on their way; FSDP2's fsdp_pre_all_gather() and fsdp_post_all_gather(). `pack` makes a contiguous
/// tensor of any dtype that the group serves, of the same size on every rank, from a shard; `unpack` fills the part of the
/// output that belongs to one rank from what it packed. Both run without autograd.
struct GatherCodec {
  std::function<at::Tensor(const at::Tensor& shard)> pack;
  std::function<void(const at::Tensor& packed, const at::Tensor& output)> unpack;
};
/// Gathers what `codec` makes of shards of floating dtype, and others as they are. The packed bytes are freed when they are unpacked. What was gathered so once is
/// passed on as it is where a unit is gathered again within neighbours, so that backward sees forward's values.
GatherHook gather_packed(GatherCodec codec);
/// bfloat16: half the bytes of float32, rounded to 8 bits of mantissa.
GatherCodec bf16_codec();
/// 8 bits, with a float32 scale for each `block` elements: about a quarter of float32's bytes. Off by 1/254 of the largest
/// of the block at most. @param block  A multiple of 4, at least 4.
GatherCodec int8_codec(int block = 64);

/// Gathers nothing: each rank's shard stands in every rank's place, so that all values are wrong with more than one rank.
/// For measuring what a step costs without its all-gathers (FSDP_USE_FAKE_ALL_GATHER).
std::unique_ptr<comm::Work> fake_gather(const ParameterGather& gather);

} // namespace ebb::shard
