#include "ebb/shard/module_checkpoints.h"

#include "module_tree.h"

#include <torch/torch.h>

#include <unordered_set>

namespace ebb::shard {

ModuleCheckpoints::ModuleCheckpoints(torch::nn::Module& model, const WrapPolicy& policy, CheckpointOptions options)
    : options_(std::move(options)) {
  TORCH_CHECK_VALUE(policy, "[ModuleCheckpoints] expected a policy, got an empty one; see wrap_by_class()");
  const auto tree = ModuleTree::of(model);
  std::vector<std::int64_t> numel(tree.nodes.size());
  std::vector<std::int64_t> open(tree.nodes.size()); // what no chosen module below has
  std::unordered_set<const c10::TensorImpl*> seen; // a tied parameter counts once, where it comes first
  for (std::size_t i = 0; i < tree.nodes.size(); ++i) {
    const auto& node = tree.nodes[i];
    for (const auto& [name, parameter] : node.parameters) {
      numel[i] += seen.insert(parameter.unsafeGetTensorImpl()).second ? parameter.numel() : 0;
    }
    open[i] = numel[i];
    for (const int child : node.children) {
      numel[i] += numel[child];
      open[i] += open[child];
    }
    if (policy({node.name, node.class_name, numel[i], open[i], node.depth, node.module})) {
      chosen_.insert(node.module);
      names_.push_back(node.name);
      open[i] = 0;
    }
  }
  TORCH_CHECK_VALUE(
      !names_.empty(), "[ModuleCheckpoints] expected a policy that chooses a module, got one that chooses none of ",
      tree.nodes.size(), "; see model.named_modules() for names and classes");
}

void check_segments(std::int64_t segments, std::int64_t modules) {
  TORCH_CHECK_VALUE(
      1 <= segments && segments <= modules, "[checkpoint_sequential] expected 1 to ", modules,
      " segments, as many as the Sequential has modules, got ", segments);
}

} // namespace ebb::shard
