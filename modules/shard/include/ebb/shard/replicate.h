#pragma once

#include "ebb/comm/mesh.h"

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

class Reducer;

/// While alive, backward leaves gradients on this rank unreduced; they go along with the next backward after it.
class ReplicaNoSync {
 public:
  explicit ReplicaNoSync(std::shared_ptr<Reducer> reducer);
  ReplicaNoSync(ReplicaNoSync&& other) noexcept = default;
  ReplicaNoSync(const ReplicaNoSync&) = delete;
  ~ReplicaNoSync();

 private:
  std::shared_ptr<Reducer> reducer_;
};

/// What replicate() is to do.
struct ReplicateOptions {
  comm::Mesh mesh;
  std::int64_t bucket_bytes = 25 * 1024 * 1024; ///< Gradients are reduced in buckets of about this size.
  std::int64_t first_bucket_bytes = 1024 * 1024; ///< The first is smaller, so that communication starts early.
  /// Sizes bucket by bucket, of which the last holds for all further ones; unless empty, replaces the two above.
  std::vector<std::int64_t> bucket_bytes_list = {};
  bool sync_module_states = true; ///< Copy rank 0's parameters and buffers to all ranks first.
  /// Copy rank 0's buffers (running statistics, counters) to all ranks at the end of each backward that reduces, so
  /// that the next forward finds the same ones everywhere. Costs one broadcast for each dtype of buffers.
  bool broadcast_buffers = true;
  /// Do not reduce buckets of which no rank has used a parameter. Ranks agree on those before the last reductions, over
  /// a group of their own, instead of after them.
  bool skip_unused = false;
  /// Promise that every step gives the same parameters gradients, equally often. What the first step that reduces shows
  /// is then taken for granted: nothing is agreed upon later, unused buckets are skipped, and the others are reduced
  /// during backward although some of their parameters are unused, or get their gradient in several parts. The first
  /// step reduces at its end. A step that breaks the promise throws at its end and names the parameter.
  bool static_graph = false;
  /// Parameters, by name, with buckets of their own that are reduced last of all.
  std::vector<std::string> delayed_parameters = {};
  /// The name of a parameter: those buckets are reduced right after its bucket instead.
  std::string delay_until = {};
  /// Copy gradients into their bucket with one call when it is full, instead of one by one. For many small parameters
  /// whose gradients zero_grad() drops; until then they are in memory twice.
  bool batched_grad_copy = false;
  /// Give a bucket memory when its first gradient comes, and keep it no longer than somebody holds its gradients: where
  /// zero_grad() drops them, forward has their memory for activations.
  bool lazy_bucket_allocation = false;
};

/// A model replicated on every rank, whose gradients are averaged during backward (PyTorch DDP).
class ReplicatedModel {
 public:
  explicit ReplicatedModel(std::shared_ptr<Reducer> reducer);
  /// The model's own parameters.
  std::vector<std::pair<std::string, at::Tensor>> named_parameters() const;
  std::vector<at::Tensor> parameters() const; ///< The tensors of named_parameters().
  /// As torch::nn::utils::clip_grad_norm_: gradients are equal on all ranks, so nothing is communicated.
  double clip_grad_norm_(double max_norm, double norm_type = 2.0);
  /// Drops (or zeroes) the gradients of all parameters.
  void zero_grad(bool set_to_none = true);
  /// Gradient accumulation without communication, for all micro-batches but the last. All ranks must do the same.
  ReplicaNoSync no_sync();
  /// Copies rank 0's buffers to all ranks now, whatever ReplicateOptions::broadcast_buffers says. Collective.
  void sync_buffers();
  /// true: backward() returns while reductions may still be under way, and finalize_backward() ends it: what is done in
  /// between overlaps them. All ranks must do the same. Not during a backward.
  void set_manual_backward_finalization(bool manual);
  /// Waits for the last backward's reductions; gradients are averaged from then on. Collective. Once for each backward
  /// that reduces, before the next.
  /// @throws ValueError when no backward waits for its end.
  void finalize_backward();
  /// Ranks and buckets, as text for people.
  std::string explain() const;
  /// After an exception in a step: drops the gradients and reductions that it left behind. Happens by itself at the
  /// next backward. Collective in effect: all ranks of a failed step must do it.
  void reset();

 private:
  std::shared_ptr<Reducer> reducer_;
};

/// Keeps the whole model on each rank and averages gradients over the mesh while backward runs, bucket by bucket in an
/// order agreed beforehand. Collective. Keep the result as long as the model trains: without it a backward throws.
///
/// @throws ValueError for options out of range, for names that are no parameter's, and for a model that fully_shard()
///         has sharded; IncompatibleStateError when the ranks' models or options differ, naming the first that does.
/// Cost: one broadcast of the model (with sync_module_states).
[[nodiscard]] ReplicatedModel replicate(torch::nn::Module& model, ReplicateOptions options);
/// The same for TorchScript.
[[nodiscard]] ReplicatedModel replicate(torch::jit::Module& model, ReplicateOptions options);

/// For module holders (TORCH_MODULE): replicate(gpt, ...).
template <class Holder>
  requires requires(Holder& holder) {
    holder.ptr();
  }
[[nodiscard]] ReplicatedModel replicate(Holder& holder, ReplicateOptions options) {
  return replicate(static_cast<torch::nn::Module&>(*holder.ptr()), std::move(options));
}

} // namespace ebb::shard

namespace ebb {
using shard::replicate;
using shard::ReplicatedModel;
} // namespace ebb
