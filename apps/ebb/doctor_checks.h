#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// What `ebb doctor` looks at, as functions that tests call one by one.
namespace ebb::app {

enum class Verdict { kOk, kWarn, kFail };
/// "ok", "warn", "fail"
std::string_view name_of(Verdict verdict);

/// One line of `ebb doctor`.
struct Check {
  Verdict verdict = Verdict::kOk;
  std::string what = {}; ///< "gloo", "memory", ...
  std::string value = {}; ///< What was found.
  std::string remedy = {}; ///< What to do; empty when the verdict is kOk.
};

/// Where the checks look. Tests give folders and variables of their own.
struct Machine {
  std::filesystem::path root = "/"; ///< Holds proc/ and sys/.
  std::filesystem::path directory = "."; ///< Where runs would be kept.
  /// Environment; empty: the process's own.
  std::function<std::optional<std::string>(const std::string& name)> variable = {};

  std::optional<std::string> get(const std::string& name) const;
};

// Versions and what this build can do (doctor_report.cpp).
Check check_versions();

// Host resources (doctor_host.cpp). Limits are those of this process: its cgroup, affinity and rlimits.
Check check_cores(const Machine& machine);
/// All memory and swap of the machine, or the cgroup's limit where that is lower; absent when it is not known.
std::optional<double> usable_memory_bytes(const Machine& machine);
Check check_memory(const Machine& machine);
Check check_disk(const Machine& machine);
Check check_open_files();
Check check_gpus(const Machine& machine, bool built_with_cuda);

// Ways between ranks (doctor_network.cpp). Each one is tried for real, on loopback or between two child processes.
Check check_gloo(const std::string& address = "127.0.0.1"); ///< Of this host.
Check check_same_host_reads();
Check check_nccl();
Check check_loopback_port();
Check check_interface(const Machine& machine);
Check check_host_name();

/// All of the above in the order in which they are printed. Takes about a second.
std::vector<Check> run_all_checks(const Machine& machine);

bool any_failed(const std::vector<Check>& checks);
/// One line per check: `ok|warn|fail  what  value`, and the remedy where there is one.
std::string as_text(const std::vector<Check>& checks);
/// {"ok": bool, "checks": [{"verdict", "what", "value", "remedy"}]}
std::string as_json(const std::vector<Check>& checks);

} // namespace ebb::app
