#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace ebb::shard {

/// One module of the tree, as a wrap policy sees it.
struct ModuleInfo {
  std::string name; ///< Fully qualified; "" for the root.
  std::string class_name; ///< "BlockImpl", "torch::nn::LinearImpl"; the script class for TorchScript.
  std::int64_t numel = 0; ///< Parameters in its subtree.
  std::int64_t unwrapped_numel = 0; ///< Of these, the ones that no unit below it has taken.
  int depth = 0; ///< 0 for the root.
  const torch::nn::Module* module = nullptr; ///< nullptr for TorchScript.
};

/// Says which modules become units. Modules are shown children first; the parameters that no deeper unit took go to the
/// nearest module above that is wrapped, in the end to the root, which is always a unit when anything is left.
using WrapPolicy = std::function<bool(const ModuleInfo&)>;

/// Only the root: the whole model is one unit. Saves little; `explain()` says so.
WrapPolicy wrap_root();

/// Every module whose not yet wrapped parameters reach `min_numel`.
WrapPolicy wrap_by_size(std::int64_t min_numel);

/// Modules of these classes, by C++ or script class name with or without namespace and "Impl": "Block", "Linear".
WrapPolicy wrap_by_class(std::vector<std::string> class_names);

/// Modules of these C++ types: wrap_by_type<BlockImpl>(). Needs the complete types.
template <class... Modules>
WrapPolicy wrap_by_type() {
  return [](const ModuleInfo& info) {
    return info.module && (... || (dynamic_cast<const Modules*>(info.module) != nullptr));
  };
}

/// Modules whose name is in the list.
/// fully_shard() throws ValueError when a name of the list is not in the model.
WrapPolicy wrap_by_name(std::vector<std::string> names);

/// A module is wrapped when any of the policies says so.
WrapPolicy wrap_any(std::vector<WrapPolicy> policies);

} // namespace ebb::shard
