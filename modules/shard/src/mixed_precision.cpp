#include "ebb/shard/mixed_precision.h"

#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <string>

namespace ebb::shard {

bool is_normalisation(const ModuleInfo& info) {
  static const std::array kinds{"Norm", "norm"};
  std::string_view name = info.class_name;
  if (const auto colon = name.rfind("::"); colon != std::string_view::npos) {
    name.remove_prefix(colon + 2);
  }
  return std::any_of(kinds.begin(), kinds.end(), [&](const char* kind) { return name.find(kind) != name.npos; });
}

MixedPrecision mixed_precision(std::string_view preset) {
  if (preset == "fp32") {
    return {at::kFloat, at::kFloat, at::kFloat, at::kFloat};
  }
  if (preset == "bf16") {
    return {at::kBFloat16, at::kFloat, at::kBFloat16, at::kFloat};
  }
  if (preset == "fp16") {
    return {at::kHalf, at::kFloat, at::kHalf, at::kFloat};
  }
  TORCH_CHECK_VALUE(false, "[mixed_precision] expected 'fp32', 'bf16' or 'fp16', got '", preset, "'");
}

} // namespace ebb::shard
