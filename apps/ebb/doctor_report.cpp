#include "doctor_checks.h"

#include "ebb/comm/cuda_status.h"

#include <torch/version.h>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include <algorithm>

#ifndef EBB_VERSION
#define EBB_VERSION "unknown"
#endif

namespace ebb::app {

Check check_versions() {
#if defined(__clang__)
  const std::string compiler = "clang " __clang_version__;
#elif defined(__GNUC__)
  const std::string compiler = "g++ " __VERSION__;
#else
  const std::string compiler = "unknown compiler";
#endif
  return {
      .what = "versions",
      .value = fmt::format("ebb {}, LibTorch {}, {}, C++ {}", EBB_VERSION, TORCH_VERSION, compiler, __cplusplus / 100)};
}

std::vector<Check> run_all_checks(const Machine& machine) {
  return {
      check_versions(),
      check_gloo(),
      check_same_host_reads(),
      check_nccl(),
      check_gpus(machine, comm::cuda_status().built),
      check_loopback_port(),
      check_interface(machine),
      check_host_name(),
      check_cores(machine),
      check_memory(machine),
      check_disk(machine),
      check_open_files()};
}

bool any_failed(const std::vector<Check>& checks) {
  return std::any_of(checks.begin(), checks.end(), [](const Check& check) { return check.verdict == Verdict::kFail; });
}

std::string as_text(const std::vector<Check>& checks) {
  std::size_t width = 0;
  for (const auto& check : checks) {
    width = std::max(width, check.what.size());
  }
  std::string text;
  for (const auto& check : checks) {
    text += fmt::format("{:<4}  {:<{}}  {}", name_of(check.verdict), check.what, width, check.value);
    text += check.remedy.empty() ? "\n" : fmt::format("  -> {}\n", check.remedy);
  }
  return text;
}

std::string as_json(const std::vector<Check>& checks) {
  auto lines = nlohmann::ordered_json::array();
  for (const auto& check : checks) {
    lines.push_back(
        {{"verdict", name_of(check.verdict)}, {"what", check.what}, {"value", check.value}, {"remedy", check.remedy}});
  }
  const nlohmann::ordered_json report{{"ok", !any_failed(checks)}, {"checks", lines}};
  // Device and host names may hold any bytes.
  return report.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

} // namespace ebb::app
