#pragma once

#include "ebb/shard/checkpoint.h"
#include "ebb/shard/wrap_policy.h"

#include <cstdint>
#include <string>
#include <type_traits>
#include <unordered_set>
#include <vector>

namespace ebb::shard {

/// Which modules of a model checkpoint their activations, chosen by the kind of policy that chooses units (PyTorch's
/// apply_activation_checkpointing). LibTorch's modules have no hooks, so the model's forward() calls its children through
/// this object, which looks up each:
///
///     x = checkpoints(block, x);  // instead of block->forward(x)
///
/// Reads the model once, when it is made; modules that are added later are called as they are. Copies are cheap and
/// choose the same modules. Not collective.
class ModuleCheckpoints {
 public:
  /// Chooses none: every module is called as it is. What a model starts with.
  ModuleCheckpoints() = default;
  /// @param model    Before or after fully_shard(); its names and sizes are those of `policy`'s ModuleInfo.
  /// @param policy   wrap_by_class({"Block"}), a lambda that takes every second one, ... Shown children first. A chosen
  ///                 module inside a chosen one is recomputed within the other's recomputation.
  /// @throws ValueError when `policy` chooses nothing.
  ModuleCheckpoints(torch::nn::Module& model, const WrapPolicy& policy, CheckpointOptions options = {});

  /// Whether the policy chose it.
  bool contains(const torch::nn::Module& module) const {
    return chosen_.count(&module) > 0;
  }
  /// Fully qualified names of the chosen modules, children first.
  const std::vector<std::string>& names() const {
    return names_;
  }

  /// `module->forward(inputs...)`, by checkpoint() when the module is chosen.
  /// @param module  A module holder or a shared_ptr, which is kept until backward; `inputs` and the result are tensors.
  template <class Pointer, class... Tensors>
    requires(std::is_convertible_v<Tensors, at::Tensor>&&...)
  at::Tensor operator()(const Pointer& module, const Tensors&... inputs) const {
    auto options = options_;
    options.enabled = options.enabled && contains(*module);
    return checkpoint_with(
        options,
        [module = Pointer(module)](const auto&... tensors) mutable -> at::Tensor {
          return module->forward(tensors...);
        },
        inputs...);
  }

 private:
  std::unordered_set<const torch::nn::Module*> chosen_;
  std::vector<std::string> names_;
  CheckpointOptions options_;
};

/// Throws ValueError unless 1 <= segments <= modules.
void check_segments(std::int64_t segments, std::int64_t modules);

/// Checkpoints a Sequential in `segments` parts of about equal length, each of which keeps its input only (PyTorch's
/// checkpoint_sequential, but for its last part, which PyTorch does not checkpoint).
/// @param sequential  A torch::nn::Sequential of modules from one tensor to one tensor; kept until backward.
/// @throws ValueError unless 1 <= segments <= the number of modules.
template <class Sequential>
at::Tensor checkpoint_sequential(
    const Sequential& sequential, std::int64_t segments, const at::Tensor& input,
    const CheckpointOptions& options = {}) {
  const auto count = static_cast<std::int64_t>(sequential->size());
  check_segments(segments, count);
  auto result = input;
  for (std::int64_t i = 0; i < segments; ++i) {
    const auto begin = count * i / segments;
    const auto end = count * (i + 1) / segments;
    result = checkpoint_with(
        options,
        [sequential = Sequential(sequential), begin, end](at::Tensor x) mutable { // a const one has no forward()
          for (auto module = begin; module < end; ++module) {
            x = (sequential->begin() + module)->forward(x);
          }
          return x;
        },
        result);
  }
  return result;
}

} // namespace ebb::shard

namespace ebb {
using shard::checkpoint_sequential;
using shard::ModuleCheckpoints;
} // namespace ebb
