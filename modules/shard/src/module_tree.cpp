#include "module_tree.h"

#include "op_results.h"

#include <torch/script.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

namespace ebb::shard {
namespace {

std::string joined(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

int add(ModuleTree& tree, torch::nn::Module& module, const std::string& name, int depth) {
  ModuleTree::Node node;
  node.name = name;
  node.class_name = module.name();
  node.depth = depth;
  node.module = &module;
  for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
    node.parameters.emplace_back(joined(name, parameter.key()), parameter.value());
  }
  for (const auto& buffer : module.named_buffers(/*recurse=*/false)) {
    node.buffers.emplace_back(joined(name, buffer.key()), buffer.value());
    tree.buffers.push_back(node.buffers.back());
  }
  for (const auto& child : module.named_children()) {
    node.children.push_back(add(tree, *child.value(), joined(name, child.key()), depth + 1));
  }
  tree.nodes.push_back(std::move(node));
  return static_cast<int>(tree.nodes.size()) - 1;
}

int add(ModuleTree& tree, torch::jit::Module module, const std::string& name, int depth) {
  ModuleTree::Node node;
  node.name = name;
  node.class_name = module.type()->name() ? module.type()->name()->name() : std::string();
  node.depth = depth;
  for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
    node.parameters.emplace_back(joined(name, parameter.name), parameter.value);
  }
  for (const auto& buffer : module.named_buffers(/*recurse=*/false)) {
    node.buffers.emplace_back(joined(name, buffer.name), buffer.value);
    tree.buffers.push_back(node.buffers.back());
  }
  for (const auto& child : module.named_children()) {
    node.children.push_back(add(tree, child.value, joined(name, child.name), depth + 1));
  }
  tree.nodes.push_back(std::move(node));
  return static_cast<int>(tree.nodes.size()) - 1;
}

// Where a parameter's bytes lie, to find parameters that overlap without being the same tensor.
struct Extent {
  const c10::StorageImpl* space; ///< nullptr: begin is an address; else within a storage that has no memory yet.
  std::uintptr_t begin;
  std::uintptr_t end;
  std::string name;
};

void check_parameter(const std::string& name, const at::Tensor& tensor, bool deferred) {
  TORCH_CHECK_VALUE(
      !tensor.is_sparse() && tensor.layout() == c10::kStrided, "[fully_shard] expected dense parameters, got '", name,
      "' with layout ", tensor.layout(), "; keep it out of the model's parameters");
  TORCH_CHECK_VALUE(
      !tensor.is_meta(), "[fully_shard] '", name,
      "' is on the meta device and has no values; initialise the model before sharding it, or build it by "
      "ebb::deferred_init() and shard what that returns");
  TORCH_CHECK_VALUE(
      deferred || !is_without_memory(tensor), "[fully_shard] '", name,
      "' has no values yet, since the model comes from ebb::deferred_init(); pass what that returned, not its model()");
  TORCH_CHECK_VALUE(
      tensor.is_leaf(), "[fully_shard] '", name,
      "' is not a leaf: it was computed from other tensors; register the tensor it is computed from");
  TORCH_CHECK_VALUE(
      c10::isFloatingType(tensor.scalar_type()) || !tensor.requires_grad(),
      "[fully_shard] expected floating-point trainable parameters, got '", name, "' of ", tensor.dtype());
}

void check_overlaps(std::vector<Extent> extents) {
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) {
    return std::tie(a.space, a.begin) < std::tie(b.space, b.begin);
  });
  for (std::size_t i = 1; i < extents.size(); ++i) {
    TORCH_CHECK_VALUE(
        extents[i].space != extents[i - 1].space || extents[i].begin >= extents[i - 1].end,
        "[fully_shard] parameters '", extents[i - 1].name, "' and '", extents[i].name,
        "' are different tensors on the same memory and cannot be sharded apart; to tie weights register the same "
        "tensor in both modules, otherwise clone one");
  }
}

} // namespace

ModuleTree ModuleTree::of(torch::nn::Module& model) {
  ModuleTree tree;
  add(tree, model, "", 0);
  return tree;
}

ModuleTree ModuleTree::of(torch::jit::Module& model) {
  ModuleTree tree;
  tree.script = true;
  add(tree, model, "", 0);
  return tree;
}

std::vector<bool> covered_nodes(const ModuleTree& tree, const WrapPolicy& modules) {
  std::vector<bool> covered;
  for (const auto& node : tree.nodes) {
    covered.push_back(modules && modules({node.name, node.class_name, 0, 0, node.depth, node.module}));
  }
  for (std::size_t i = tree.nodes.size(); i-- > 0;) { // from the root down
    for (const int child : tree.nodes[i].children) {
      covered[child] = covered[child] || covered[i];
    }
  }
  return covered;
}

std::vector<std::pair<std::string, at::Tensor>> ignored_parameters(
    const ModuleTree& tree, const WrapPolicy& modules, const std::vector<std::string>& names) {
  std::vector<std::pair<std::string, at::Tensor>> found;
  std::unordered_set<const c10::TensorImpl*> seen;
  std::unordered_set<std::string> unknown(names.begin(), names.end());
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    if (seen.insert(tensor.unsafeGetTensorImpl()).second) {
      found.emplace_back(name, tensor);
    }
  };
  const auto ignored = covered_nodes(tree, modules);
  const std::function<void(int)> visit = [&](int index) {
    const auto& node = tree.nodes[index];
    for (const auto& [name, tensor] : node.parameters) {
      if (unknown.erase(name) > 0 || ignored[index]) {
        add(name, tensor);
      }
    }
    for (const int child : node.children) {
      visit(child);
    }
  };
  visit(static_cast<int>(tree.nodes.size()) - 1);
  TORCH_CHECK_VALUE(
      unknown.empty(), "[fully_shard] ignored_parameters: expected names of the model's parameters, got '",
      unknown.empty() ? std::string() : *unknown.begin(), "'; see model.named_parameters()");
  return found;
}

std::vector<UnitPlan> plan_units(
    const ModuleTree& tree, const WrapPolicy& policy, const WrapPolicy& keep_full,
    const std::vector<std::pair<std::string, at::Tensor>>& ignored, bool deferred) {
  // Distinct tensors in module order, each with every name it is registered under.
  std::unordered_map<const c10::TensorImpl*, std::vector<std::string>> names;
  std::vector<Extent> extents;
  std::unordered_set<const c10::TensorImpl*> full;
  for (const auto& node : tree.nodes) {
    const bool keeps = keep_full && keep_full({node.name, node.class_name, 0, 0, node.depth, node.module});
    for (const auto& [name, tensor] : node.parameters) {
      if (keeps) {
        full.insert(tensor.unsafeGetTensorImpl());
      }
      auto& all = names[tensor.unsafeGetTensorImpl()];
      all.push_back(name);
      if (all.size() > 1) {
        continue;
      }
      check_parameter(name, tensor, deferred);
      if (tensor.numel() > 0) {
        const auto* space = is_without_memory(tensor) ? tensor.storage().unsafeGetStorageImpl() : nullptr;
        const auto begin = space ? static_cast<std::uintptr_t>(tensor.storage_offset() * tensor.element_size())
                                 : reinterpret_cast<std::uintptr_t>(tensor.data_ptr());
        std::int64_t span = 1;
        for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
          span += (tensor.size(dim) - 1) * tensor.stride(dim);
        }
        extents.push_back({space, begin, begin + span * tensor.element_size(), name});
      }
    }
  }
  check_overlaps(std::move(extents));

  std::unordered_set<const c10::TensorImpl*> taken; // by a unit, or by nobody
  for (const auto& [name, tensor] : ignored) {
    taken.insert(tensor.unsafeGetTensorImpl());
  }
  std::vector<std::int64_t> numel(tree.nodes.size());
  std::vector<UnitPlan> units;
  for (std::size_t i = 0; i < tree.nodes.size(); ++i) {
    const auto& node = tree.nodes[i];
    std::vector<UnitPlan::Parameter> untaken;
    std::unordered_set<const c10::TensorImpl*> seen;
    std::int64_t untaken_numel = 0;
    std::int64_t all_numel = 0;
    const std::function<void(int)> collect = [&](int index) {
      const auto& inner = tree.nodes[index];
      for (const auto& [name, tensor] : inner.parameters) {
        if (!seen.insert(tensor.unsafeGetTensorImpl()).second) {
          continue;
        }
        all_numel += tensor.numel();
        if (!taken.count(tensor.unsafeGetTensorImpl())) {
          untaken.push_back(
              {names.at(tensor.unsafeGetTensorImpl()), tensor, full.contains(tensor.unsafeGetTensorImpl())});
          untaken_numel += tensor.numel();
        }
      }
      for (const int child : inner.children) {
        collect(child);
      }
    };
    collect(static_cast<int>(i));
    const bool root = i + 1 == tree.nodes.size();
    ModuleInfo info{node.name, node.class_name, all_numel, untaken_numel, node.depth, node.module};
    const bool wanted = policy && policy(info);
    if (untaken.empty() || !(wanted || root)) {
      continue;
    }
    for (const auto& parameter : untaken) {
      taken.insert(parameter.tensor.unsafeGetTensorImpl());
    }
    units.push_back({root ? "(root)" : node.name, info, std::move(untaken)});
  }
  return units;
}

void check_aliases(const ModuleTree& tree, const std::vector<UnitPlan>& plans) {
  std::unordered_map<const c10::StorageImpl*, int> holders;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& node : tree.nodes) {
    for (const auto& [name, tensor] : node.parameters) {
      if (seen.insert(tensor.unsafeGetTensorImpl()).second) {
        ++holders[tensor.storage().unsafeGetStorageImpl()];
      }
    }
  }
  for (const auto& plan : plans) {
    for (const auto& parameter : plan.parameters) {
      const auto& storage = parameter.tensor.storage();
      const auto known = holders.at(storage.unsafeGetStorageImpl());
      TORCH_CHECK_VALUE(
          static_cast<int>(storage.use_count()) <= known || !parameter.tensor.is_view(), "[fully_shard] '",
          parameter.names.front(),
          "' was registered as a view (of weight.t(), say), and autograd keeps what it is a view of; register its "
          "clone(), which has the same strides");
      TORCH_CHECK_VALUE(
          static_cast<int>(storage.use_count()) <= known, "[fully_shard] '", parameter.names.front(), "' has ",
          storage.use_count() - known,
          " alias(es) outside the model's parameters (a kept view such as weight.t(), a detach(), a live autograd "
          "graph, or a buffer on the same memory); they would not see later updates. Drop them, or make them after "
          "fully_shard()");
    }
  }
}

} // namespace ebb::shard
