#pragma once

#include "ebb/shard/wrap_policy.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch::jit {
struct Module;
}

namespace ebb::shard {

/// A model as sharding sees it, whether it was written in C++ or loaded from TorchScript: modules, children first, with
/// the parameters and buffers each registers itself.
struct ModuleTree {
  struct Node {
    std::string name;
    std::string class_name;
    int depth = 0;
    const torch::nn::Module* module = nullptr; ///< nullptr for TorchScript.
    std::vector<std::pair<std::string, at::Tensor>> parameters; ///< Own ones; fully qualified names.
    std::vector<std::pair<std::string, at::Tensor>> buffers; ///< Own ones.
    std::vector<int> children; ///< Indices into nodes; smaller than this node's.
  };
  std::vector<Node> nodes; ///< The root is last.
  std::vector<std::pair<std::string, at::Tensor>> buffers;
  bool script = false;

  static ModuleTree of(torch::nn::Module& model);
  static ModuleTree of(torch::jit::Module& model);
};

/// A unit to be: the module that was wrapped and the parameters it takes, tied ones with all their names.
struct UnitPlan {
  struct Parameter {
    std::vector<std::string> names;
    at::Tensor tensor;
    bool keep_full = false; ///< Some module that registers it keeps full precision.
    std::optional<c10::ScalarType> compute_dtype = {}; ///< As MixedPrecision::param_dtype_override_fn says.
  };
  std::string name;
  ModuleInfo info;
  std::vector<Parameter> parameters;
};

/// Whether `modules` accepts a node or one above it, by node. Shows it every node once, children first, as policies expect.
std::vector<bool> covered_nodes(const ModuleTree& tree, const WrapPolicy& modules);

/// The parameters of modules that `modules` accepts, with those below them, and the parameters named.
/// @throws ValueError for a name that is no parameter's.
std::vector<std::pair<std::string, at::Tensor>> ignored_parameters(
    const ModuleTree& tree, const WrapPolicy& modules, const std::vector<std::string>& names);

/// Applies `policy` to the tree. Units are in module order, the root's last.
/// `keep_full` marks the parameters of modules that it accepts. `deferred`: parameters may be without values yet.
/// @throws ValueError for parameters that cannot be sharded; names them.
std::vector<UnitPlan> plan_units(
    const ModuleTree& tree, const WrapPolicy& policy, const WrapPolicy& keep_full = {},
    const std::vector<std::pair<std::string, at::Tensor>>& ignored = {}, bool deferred = false);

/// A view of a parameter that somebody kept would go on showing bytes that nobody updates any more.
/// @throws ValueError that names the parameter.
void check_aliases(const ModuleTree& tree, const std::vector<UnitPlan>& plans);

} // namespace ebb::shard
