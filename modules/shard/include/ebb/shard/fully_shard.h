#pragma once

#include "ebb/base/shard_layout.h"
#include "ebb/comm/mesh.h"
#include "ebb/shard/wrap_policy.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}
namespace torch::jit {
struct Module;
}

namespace ebb::shard {

class Engine;

/// What is kept unsharded, and for how long. Names as in PyTorch FSDP; ZeRO stages in brackets.
enum class Strategy {
  kFullShard, ///< Parameters, gradients and optimizer state sharded; parameters gathered again for backward (ZeRO-3).
  kShardGradOp, ///< Parameters stay gathered from forward to the end of backward (ZeRO-2).
  kNoShard, ///< Parameters replicated, gradients all-reduced; optimizer state whole on every rank.
};
std::string_view name_of(Strategy strategy);

/// What fully_shard() is to do.
struct ShardOptions {
  /// Over which ranks. The mesh's "shard" axis holds one copy of the model.
  comm::Mesh mesh;
  Strategy strategy = Strategy::kFullShard;
  WrapPolicy wrap = wrap_by_size(1'000'000);
  /// Buffers that hold one gathered unit each; never more in use but for what one operator needs at once. This is the
  /// rate limiter of the FSDP paper (Zhao et al. 2023, section 3.4). At least 1.
  int frames = 2;
  /// Units gathered ahead of their use, in frames of their own. 0 turns prefetch off.
  int prefetch = 1;
  /// Copy rank 0's parameters and buffers to all ranks first. Off: every rank must have built the same model from the
  /// same seed.
  bool sync_module_states = true;
  /// Compare the order of gathered units between ranks at each end of backward; names the first that differs.
  bool check_order = false;
};

/// How many bytes of unsharded parameters may be held, and are. The invariant, checked in test builds:
/// held <= frames + pinned + kept.
struct Residency {
  std::int64_t held_bytes = 0; ///< Unsharded parameters in memory now.
  std::int64_t peak_held_bytes = 0;
  std::int64_t frame_bytes = 0; ///< (frames + prefetch) x largest unit: the allowance.
  std::int64_t pinned_bytes = 0; ///< Beyond the allowance for the running operator.
  std::int64_t kept_bytes = 0; ///< By kShardGradOp, kNoShard or a full-parameter scope.
};

/// Counts since fully_shard(), or since reset_stats().
struct ShardStats {
  std::int64_t unshards = 0; ///< All-gathers of units.
  std::int64_t prefetched = 0; ///< Of these, started before their first use.
  std::int64_t mispredicted = 0; ///< Prefetched and evicted unused.
  std::int64_t reduces = 0; ///< Reduce-scatters (all-reduces for kNoShard) of units.
  std::int64_t touches = 0; ///< Operators that found their unit resident.
  std::int64_t evictions = 0;
};

/// What happens at both ends of a full-parameter scope.
struct FullParametersOptions {
  bool writeback = true; ///< Changes made inside the scope go to the shards at its end.
  bool rank0_only = false; ///< Other ranks keep sharded parameters; excludes writeback.
};

/// While alive, every parameter of the model is whole and may be read by pointer and written. Collective at both ends.
class FullParameters {
 public:
  FullParameters(std::shared_ptr<Engine> engine, FullParametersOptions options);
  FullParameters(FullParameters&&) = default;
  FullParameters(const FullParameters&) = delete;
  /// Writes back and reshards unless close() did. Errors are logged, not thrown: call close() to see them.
  ~FullParameters();
  /// Writes back and reshards now.
  void close();

 private:
  std::shared_ptr<Engine> engine_;
  FullParametersOptions options_;
};

/// A sharded model. Copies are handles to the same one. The model itself is used as before: `model->forward(x)`.
class ShardedModel {
 public:
  explicit ShardedModel(std::shared_ptr<Engine> engine);

  /// One leaf per original parameter: the slice this rank holds (1-D, possibly empty), a view of its unit's flat shard,
  /// with its grad after backward. What optimizers take. Names as the model's own; tied parameters appear once.
  std::vector<std::pair<std::string, at::Tensor>> named_parameters() const;
  std::vector<at::Tensor> parameters() const;

  /// Global norm of all gradients, of which each is then scaled so that the norm is at most `max_norm`. Collective.
  /// @param norm_type  1, 2 or infinity.
  /// @return The norm before clipping, the same on all ranks.
  double clip_grad_norm_(double max_norm, double norm_type = 2.0);

  /// Drops (or zeroes) the gradients of all shards.
  void zero_grad(bool set_to_none = true);

  /// See FullParameters. Collective.
  FullParameters full_parameters(FullParametersOptions options = {});

  /// Units, sizes, shards, frames and the expected peak, as text for people.
  std::string explain() const;

  /// Which part of each parameter this rank holds.
  std::vector<ShardLayout> layout() const;

  Residency residency() const;
  ShardStats stats() const;
  void reset_stats();

  /// Gives back everything an interrupted step left behind: frames, partial gradients, collectives. Happens by itself at
  /// the next forward after an exception. Collective in effect: all ranks of a failed step must do it.
  void reset();

  std::int64_t num_parameters() const; ///< Of the unsharded model; tied parameters once.
  std::int64_t shard_bytes() const; ///< Parameter bytes this rank keeps.
  const comm::Mesh& mesh() const;
  Engine& engine() const {
    return *engine_;
  }

 private:
  std::shared_ptr<Engine> engine_;
};

/// Shards `model`'s parameters over the ranks of the mesh, in place. The model's code, its parameter handles and its
/// forward stay as they are. Collective.
///
/// Afterwards build optimizers on the result's parameters(), never on model.parameters(): those hold no data between
/// uses, and an optimizer on them is refused at its first step.
///
/// @throws ValueError for models that cannot be sharded; names unit and parameter.
/// Cost: one broadcast of the model (with sync_module_states).
ShardedModel fully_shard(torch::nn::Module& model, ShardOptions options);
ShardedModel fully_shard(torch::jit::Module& model, ShardOptions options);

/// For module holders (TORCH_MODULE): fully_shard(gpt, ...).
template <class Holder>
  requires requires(Holder& holder) {
    holder.ptr();
  }
ShardedModel fully_shard(Holder& holder, ShardOptions options) {
  return fully_shard(static_cast<torch::nn::Module&>(*holder.ptr()), std::move(options));
}

} // namespace ebb::shard

namespace ebb {
using shard::fully_shard;
using shard::ShardedModel;
} // namespace ebb
