#pragma once

#include "ebb/base/shard_layout.h"
#include "ebb/comm/mesh.h"
#include "ebb/shard/comm_hook.h"
#include "ebb/shard/gather_hook.h"
#include "ebb/shard/mixed_precision.h"
#include "ebb/shard/offload.h"
#include "ebb/shard/shard_stats.h"
#include "ebb/shard/wrap_policy.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace torch::nn {
class Module;
}
namespace torch::jit {
struct Module;
}

namespace ebb::shard {

class Engine;

/// What is kept unsharded, and for how long. Names as in PyTorch FSDP; ZeRO stages in brackets. On a mesh with a
/// "replicate" axis the first two are their hybrid forms, as in FSDP2; the hybrid names insist on such a mesh.
enum class Strategy {
  kFullShard, ///< Parameters, gradients and optimizer state sharded; parameters gathered again for backward (ZeRO-3).
  kShardGradOp, ///< Parameters stay gathered from forward to the end of backward (ZeRO-2).
  kNoShard, ///< Parameters replicated, gradients all-reduced; optimizer state whole on every rank.
  kHybridShard, ///< kFullShard within the mesh's "shard" axis, copies along "replicate" (HSDP).
  kHybridShardZero2, ///< kShardGradOp within the mesh's "shard" axis, copies along "replicate".
};
/// "full_shard", "hybrid_shard_zero2", ...
std::string_view name_of(Strategy strategy);

/// FSDP2's reshard_after_forward. true: give a unit's memory back after its forward; false: keep it until the end of
/// backward; n: keep 1/n of it, so that backward gathers within n neighbouring ranks, say those of one host. n divides
/// the ranks of the shard axis.
using ReshardAfterForward = std::variant<bool, int>;

/// When backward starts the gathers that ShardOptions::prefetch asks for. Names as in PyTorch FSDP.
enum class BackwardPrefetch {
  kBackwardPre, ///< When a unit is about to be used: hides most, holds one unit more.
  kBackwardPost, ///< When the gradients of the unit in use are complete and its memory was given back.
};

/// See ShardOptions::comm_allocator.
using CommAllocator = std::function<at::Tensor(std::int64_t bytes, c10::Device device)>;

/// What one unit does otherwise than the rest. What is not set is as in ShardOptions.
struct UnitOptions {
  std::optional<bool> shard = {}; ///< false: this unit is whole on every rank, as with kNoShard.
  std::optional<ReshardAfterForward> reshard_after_forward = {};
};

/// What fully_shard() is to do.
struct ShardOptions {
  /// Over which ranks. The mesh's "shard" axis holds one copy of the model.
  comm::Mesh mesh;
  Strategy strategy = Strategy::kFullShard;
  WrapPolicy wrap = wrap_by_size(1'000'000);
  /// Asked once for each unit, with the module it wraps.
  std::function<UnitOptions(const ModuleInfo&)> unit_options = {};
  /// Dtypes of compute, reduction and buffers; by default everything as the model has it.
  MixedPrecision mixed_precision = {};
  /// Where shards, gradients and optimizer state are when they are not in use; by default on the model's device.
  std::optional<OffloadPolicy> offload = {};
  /// Buffers that hold one gathered unit each; never more in use but for what one operator needs at once. This is the
  /// rate limiter of the FSDP paper (Zhao et al. 2023, section 3.4). At least 1.
  int frames = 2;
  /// Units gathered ahead of their use, in frames of their own. 0 turns prefetch off.
  int prefetch = 1;
  BackwardPrefetch backward_prefetch = BackwardPrefetch::kBackwardPre;
  /// Copy rank 0's parameters and buffers to all ranks first. Off: every rank must have built the same model from the
  /// same seed.
  bool sync_module_states = true;
  /// Modules, with all below them, whose parameters and buffers are left as they are: not sharded, not gathered, and
  /// their gradients not reduced. At the start they still get rank 0's values. A parameter that is also registered
  /// elsewhere is ignored there too. ShardedModel::ignored_parameters() lists them, for an optimizer of their own.
  WrapPolicy ignored = {};
  /// The same for single parameters, by name. @throws ValueError for a name that is no parameter's.
  std::vector<std::string> ignored_parameters = {};
  /// Replaces the reduction of gradients: see comm_hook.h.
  CommHook comm_hook = {};
  /// Replaces the all-gather of parameters: see gather_hook.h.
  GatherHook gather_hook = {};
  /// Reduce gradients in groups of their own (Mesh::separate()), so that reductions and gathers do not queue behind each
  /// other. Costs the connections of a second mesh.
  bool separate_reduce_group = false;
  /// Makes the memory that all-gathers fill and reductions read: at least `bytes` of uint8, contiguous, on `device`. By
  /// default that of LibTorch's allocator. For memory that the transport knows, of a NCCL group's allocator or symmetric
  /// memory (FSDP2's set_allocate_memory_from_process_group_for_comm() and set_symm_mem_for_comm()). Called when frames
  /// and buffers are first needed, and for what is gathered beyond them: by unshard(), in a scope, for one operator.
  CommAllocator comm_allocator = {};
  /// Where to put shards, frames and buffers; by default where the model is. A model that is too large for the device is
  /// moved there shard by shard. The model's parameters and buffers are on this device afterwards; those that are ignored
  /// stay. @throws ValueError for a device that is not there.
  std::optional<c10::Device> device = {};
  /// Called with each unit's averaged gradient, this rank's shard of it, flattened, before it is added to the leaves'
  /// grads; may change it in place (FSDP2's all-reduce hook). Same on all ranks.
  std::function<void(const std::string& unit, at::Tensor& gradient)> gradient_hook = {};
  /// Gradients are summed over all ranks and divided by this; by default by the number of ranks.
  std::optional<double> gradient_divide_factor = {};
  /// Compare the order of gathered and reduced units between ranks before each of these collectives, and name the first
  /// that differs. Costs one small exchange each.
  bool check_order = false;
};

/// What happens at both ends of a full-parameter scope.
struct FullParametersOptions {
  bool writeback = true; ///< Changes made inside the scope go to the shards at its end.
  bool rank0_only = false; ///< Other ranks keep sharded parameters; excludes writeback.
  /// Only the units that hold parameters of these modules or of modules below them, by name; empty: all of the model.
  std::vector<std::string> modules = {};
  /// false: `modules` are names of units, and only these are opened.
  bool recurse = true;
  /// Whole parameters are on the CPU, so that a model larger than the device can be looked at unit by unit.
  bool offload_to_cpu = false;
  /// Each parameter's grad() is whole too, where it has one; with writeback changes to it go to the shards.
  bool with_grads = false;
};

/// While alive, every parameter of the model (or of the modules asked for) is whole and may be read by pointer and
/// written. Collective at both ends.
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

/// A unit being gathered by ShardedModel::unshard(). Dropping the handle does not undo that.
class UnshardHandle {
 public:
  /// Returns when the unit's parameters can be used; any operator that uses them waits by itself.
  void wait();

 private:
  friend class ShardedModel;
  UnshardHandle(std::shared_ptr<Engine> engine, std::vector<int> units)
      : engine_(std::move(engine)), units_(std::move(units)) {}
  std::shared_ptr<Engine> engine_;
  std::vector<int> units_;
};

/// The end of a backward, begun by ShardedModel::finalize_backward(). Dropping the handle leaves it to a later call.
class GradientReductionHandle {
 public:
  /// Returns when all gradients are on the shards. Collective. Once; afterwards it does nothing.
  void wait();

 private:
  friend class ShardedModel;
  explicit GradientReductionHandle(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}
  std::shared_ptr<Engine> engine_;
};

/// While alive, backward leaves gradients on this rank unreduced; they go along with the next backward after it.
class NoSync {
 public:
  explicit NoSync(std::shared_ptr<Engine> engine);
  NoSync(NoSync&& other) noexcept = default;
  NoSync(const NoSync&) = delete;
  ~NoSync();

 private:
  std::shared_ptr<Engine> engine_;
};

/// A sharded model. Copies are handles to the same one. The model itself is used as before: `model->forward(x)`.
class ShardedModel {
 public:
  explicit ShardedModel(std::shared_ptr<Engine> engine);

  /// One leaf per original parameter: the slice this rank holds (1-D, possibly empty), a view of its unit's flat shard,
  /// with its grad after backward. What optimizers take. Names as the model's own; tied parameters appear once.
  std::vector<std::pair<std::string, at::Tensor>> named_parameters() const;
  std::vector<at::Tensor> parameters() const; ///< The leaves of named_parameters().
  /// The parameters that ShardOptions said to ignore: the model's own.
  std::vector<std::pair<std::string, at::Tensor>> ignored_parameters() const;

  /// Calls `function` with each leaf in backward, as soon as the gradient of its unit is averaged and on it: for an
  /// optimizer that steps there and drops the gradient, so that not all gradients exist at a time. A leaf that got no
  /// gradient on any rank shows zeros. Not with gradient accumulation or clipping, which need all gradients. An empty
  /// function takes it back.
  void set_optimizer_in_backward(std::function<void(const std::string& name, at::Tensor& leaf)> function);

  /// Global norm of all gradients, of which each is then scaled so that the norm is at most `max_norm`. Collective.
  /// @param norm_type  1, 2 or infinity.
  /// @return The norm before clipping, the same on all ranks.
  double clip_grad_norm_(double max_norm, double norm_type = 2.0);

  /// Drops (or zeroes) the gradients of all shards, and drops what no_sync() has accumulated. An optimizer's own
  /// zero_grad() sees the shards alone. After set_is_last_backward(false) all ranks must call it alike.
  /// @throws ValueError between a backward and its finalize_backward().
  void zero_grad(bool set_to_none = true);

  /// Gradient accumulation without communication: `{ auto scope = model.no_sync(); loss.backward(); }` for all
  /// micro-batches but the last (FSDP paper, section 3.3.4). Costs memory for unsharded gradients, in the reduction's
  /// dtype. Without it every backward reduces and the shards accumulate. All ranks must do the same.
  NoSync no_sync();
  /// The same as a switch, for all units or for some: gradients of units that are off stay local until a backward that
  /// finds them on again.
  void set_requires_gradient_sync(bool sync);
  /// As above, for the units named.
  void set_requires_gradient_sync(const std::vector<std::string>& units, bool sync);
  /// Hybrid sharding: false leaves out the all-reduce between copies while accumulating. Backward reduces over the shard
  /// axis only and adds up this rank's shard, in the reduction's dtype; the first backward after true takes the sum to
  /// the copies. Between no_sync() and a whole reduction in memory and in communication. No effect without copies.
  void set_requires_all_reduce(bool all_reduce);
  /// As above, for the units named.
  void set_requires_all_reduce(const std::vector<std::string>& units, bool all_reduce);

  /// For several backwards a step, of micro-batches in a pipeline say. false: the end of a backward does not wait for
  /// the reductions it started, which go on meanwhile; the first backward after true waits for all of them, and gradients
  /// are on the shards after it. Keeps the recorded order of uses too, so that several forwards may come before their
  /// backwards. All ranks must do the same, and nothing may read or write gradients in between, but for zero_grad() on all ranks.
  void set_is_last_backward(bool is_last);
  /// true: the end of a backward reduces nothing by itself beyond the units that are complete; finalize_backward() does.
  /// For a backward in parts (inputs first, weights later), whose units are then reduced once. @throws ValueError while a
  /// backward is not finalized.
  void set_manual_backward_finalization(bool manual);
  /// Reduces what the backwards since the last call have left. Collective.
  /// @param async_op  Return when the reductions were started; the handle waits for them.
  GradientReductionHandle finalize_backward(bool async_op = false);
  /// How many reductions may be under way while the next is filled: 1 by default. More hide more of a slow network's
  /// latency, at the price of one reduce buffer each. At least 1; between steps.
  void set_reduce_scatter_max_input_buffers(int number);

  /// Gathers units before their use and holds them until reshard() or the end of a backward. Collective; at once, the
  /// handle waits. Names as explain() spells them.
  /// @throws ValueError for a name that is not a unit; lists the units.
  UnshardHandle unshard(const std::vector<std::string>& units);
  /// Gives the memory of units back, whoever gathered them. Not while an operator uses them.
  void reshard(const std::vector<std::string>& units);
  /// Changes what happens to units after forward from the next one on; see ReshardAfterForward, of which integers are
  /// fixed by fully_shard().
  void set_reshard_after_forward(const std::vector<std::string>& units, bool reshard);
  /// false: the units stay gathered after backward, until their shards are written to. For several backwards a step.
  void set_reshard_after_backward(const std::vector<std::string>& units, bool reshard);
  /// true: the units have memory of their own, which is kept when they are resharded, so that their parameters are at the
  /// same addresses each time. They stay gathered from forward to the end of backward (with kBackwardPost, to that of
  /// their own), and in evaluation until their
  /// shards are written to.
  void set_keep_unsharded_storage(const std::vector<std::string>& units, bool keep);
  /// The next gather waits for `done` first, which then is dropped: for an optimizer that steps on another thread.
  /// Called without locks, by the thread that uses the model.
  void set_post_optim_event(std::function<void()> done);
  /// true: gathers and computes in the shards' own dtype from here on, whatever MixedPrecision says, and gives buffers
  /// their own dtype back. For evaluation, beside model->eval(); false beside model->train(). Not between a forward and its
  /// backward: that backward would throw.
  void set_full_precision(bool full);
  /// While `unit` runs forward, gather `next` in this order instead of what the last step's order predicts; empty goes
  /// back to the prediction. At most as many as frames allow are gathered.
  void set_forward_prefetch(const std::string& unit, const std::vector<std::string>& next);
  /// The same while `unit` runs backward.
  void set_backward_prefetch(const std::string& unit, const std::vector<std::string>& next);
  std::vector<std::string> units() const; ///< Names, in module order.

  /// `output` in MixedPrecision::output_dtype, for what a model returns: `model.cast_output(net->forward(x))`.
  at::Tensor cast_output(const at::Tensor& output) const;

  /// See FullParameters. Collective.
  FullParameters full_parameters(FullParametersOptions options = {});

  /// Units, sizes, shards, frames and the expected peak, as text for people; after a step also what was measured since
  /// fully_shard() or reset_stats(): peaks, gathers, and how much of the communication was hidden behind compute.
  std::string explain() const;

  /// Which part of each parameter this rank holds.
  std::vector<ShardLayout> layout() const;

  Residency residency() const; ///< What is unsharded now.
  ShardStats stats() const; ///< What was gathered and reduced.
  void reset_stats(); ///< Counts from zero again, and peaks from now.

  /// Gives back everything an interrupted step left behind: frames, partial gradients, collectives. Happens by itself at
  /// the next forward after an exception in a backward; one in a forward leaves nothing to give back. Collective in effect: all ranks of a failed step must do it.
  void reset();

  std::int64_t num_parameters() const; ///< Of the unsharded model; tied parameters once.
  std::int64_t shard_bytes() const; ///< Parameter bytes this rank keeps.
  const comm::Mesh& mesh() const;
  /// For ebb's own tests.
  Engine& engine() const {
    return *engine_;
  }

 private:
  std::shared_ptr<Engine> engine_;
};

/// Lets models that run in turns share their frames, as FSDP2's share_comm_ctx(): the memory for unsharded parameters is
/// then that of the one with most frames times the largest unit of all, instead of the sum. A model that finds no free
/// frame takes one that another has gathered and does not use. Frames are made by the first model's comm_allocator. One device and one thread at a time. Between steps.
/// @throws ValueError for models on different devices, and for one inside a full_parameters() scope.
void share_frames(const std::vector<ShardedModel>& models);

/// Shards `model`'s parameters over the ranks of the mesh, in place. The model's code, its parameter handles and its
/// forward stay as they are. Collective.
///
/// Afterwards build optimizers on the result's parameters(), never on model.parameters(): those hold no data between
/// uses, and an optimizer on them is refused at its first step.
///
/// @throws ValueError for models that cannot be sharded and options out of range; names unit and parameter.
/// @throws IncompatibleStateError on every rank when the ranks' options, models or units differ; names the first that
///         does.
/// Cost: one broadcast of the model (with sync_module_states).
[[nodiscard]] ShardedModel fully_shard(torch::nn::Module& model, ShardOptions options);
/// The same for TorchScript.
[[nodiscard]] ShardedModel fully_shard(torch::jit::Module& model, ShardOptions options);

/// For module holders (TORCH_MODULE): fully_shard(gpt, ...).
template <class Holder>
  requires requires(Holder& holder) {
    holder.ptr();
  }
[[nodiscard]] ShardedModel fully_shard(Holder& holder, ShardOptions options) {
  return fully_shard(static_cast<torch::nn::Module&>(*holder.ptr()), std::move(options));
}

} // namespace ebb::shard

namespace ebb {
using shard::fully_shard;
using shard::ShardedModel;
} // namespace ebb
