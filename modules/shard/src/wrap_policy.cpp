#include "ebb/shard/wrap_policy.h"

#include "ebb/base/log.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <set>
#include <string_view>
#include <utility>

namespace ebb::shard {
namespace {

// "ebb::examples::BlockImpl" is asked for as such, as "BlockImpl" or as "Block".
bool names_class(const std::string& class_name, std::string_view asked) {
  std::string_view name = class_name;
  if (name == asked) {
    return true;
  }
  if (const auto colon = name.rfind("::"); colon != std::string_view::npos) {
    name.remove_prefix(colon + 2);
  }
  constexpr std::string_view kSuffix = "Impl";
  return name == asked || (name.size() > kSuffix.size() && name.ends_with(kSuffix) &&
                           name.substr(0, name.size() - kSuffix.size()) == asked);
}

} // namespace

WrapPolicy wrap_root() {
  return [](const ModuleInfo&) { return false; };
}

WrapPolicy wrap_by_size(std::int64_t min_numel) {
  return [min_numel](const ModuleInfo& info) { return info.unwrapped_numel >= min_numel; };
}

WrapPolicy wrap_by_class(std::vector<std::string> class_names) {
  // Kept in the policy itself: copies of it, for ranks that are threads, do not meet.
  return [class_names = std::move(class_names), found = false](const ModuleInfo& info) mutable {
    const bool wanted = std::any_of(
        class_names.begin(), class_names.end(), [&](const auto& asked) { return names_class(info.class_name, asked); });
    found = found || wanted;
    if (info.depth == 0 && !std::exchange(found, false)) { // the root is shown last
      log::warn(
          "wrap_by_class: the model has no module of class '{}'{}, so that only the root is a unit; its own class is "
          "'{}'",
          class_names.empty() ? std::string() : class_names.front(), class_names.size() > 1 ? " or the others" : "",
          info.class_name);
    }
    return wanted;
  };
}

WrapPolicy wrap_by_name(std::vector<std::string> names) {
  // Modules are shown children first and the root last: what has not been seen by then is not in the model.
  std::set<std::string> unseen(names.begin(), names.end());
  return [names = std::move(names), unseen = std::move(unseen)](const ModuleInfo& info) mutable {
    unseen.erase(info.name);
    if (info.depth == 0 && !unseen.empty()) {
      const auto missing = *unseen.begin();
      unseen.insert(names.begin(), names.end());
      TORCH_CHECK_VALUE(
          false, "[wrap_by_name] expected names of modules of the model, got '", missing,
          "', which is not among them; see model.named_modules()");
    }
    if (info.depth == 0) {
      unseen.insert(names.begin(), names.end()); // for the next model
    }
    return std::find(names.begin(), names.end(), info.name) != names.end();
  };
}

WrapPolicy wrap_any(std::vector<WrapPolicy> policies) {
  return [policies = std::move(policies)](const ModuleInfo& info) {
    bool any = false;
    for (const auto& policy : policies) { // all of them: wrap_by_name wants to see every module
      any = policy(info) || any;
    }
    return any;
  };
}

} // namespace ebb::shard
