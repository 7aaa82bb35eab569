#pragma once

#include "ebb/shard/wrap_policy.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace ebb::shard {

/// Modules that stay in full precision by default: normalisation layers, by class name.
bool is_normalisation(const ModuleInfo& info);

/// Dtypes of a sharded model (FSDP paper, section 4.4). Shards and optimizer state keep the dtype that the model was
/// built in, so that small updates are not lost; what is not set here is in that dtype too. Only floating-point
/// parameters and buffers are converted.
struct MixedPrecision {
  /// Of gathered parameters, of the operators that use them, and of the all-gather's bytes.
  std::optional<c10::ScalarType> param_dtype = {};
  /// Of gradients on their way: the reduction sums in it (half types are summed in float, then rounded).
  std::optional<c10::ScalarType> reduce_dtype = {};
  /// Of buffers, converted by fully_shard(). set_full_precision() converts them back; what was rounded stays rounded.
  std::optional<c10::ScalarType> buffer_dtype = {};
  /// To which ShardedModel::cast_output() converts.
  std::optional<c10::ScalarType> output_dtype = {};
  /// Leave gradients in reduce_dtype on the shards instead of converting them to the shard's dtype.
  bool keep_low_precision_grads = false;
  /// Convert the other floating-point inputs of operators that use parameters to the parameters' dtype, so that a model
  /// takes float inputs and activations follow.
  bool cast_forward_inputs = true;
  /// Modules whose parameters and buffers keep their dtype.
  WrapPolicy keep_full = is_normalisation;
  /// Asked for each floating-point parameter, by its first name: a dtype replaces param_dtype, and keep_full, for it alone;
  /// without one those decide. The same on all ranks. Parameters of several dtypes in a unit are gathered one by one.
  std::function<std::optional<c10::ScalarType>(const std::string& name, const at::Tensor& parameter)>
      param_dtype_override_fn = {};
};

/// "fp32": everything float32. "bf16": bfloat16 parameters and buffers, float32 reduction and outputs. "fp16": the same
/// with float16, to be trained with ShardedGradScaler.
/// @throws ValueError for another name.
MixedPrecision mixed_precision(std::string_view preset);

} // namespace ebb::shard
