#include "doctor_checks.h"

#include <fmt/core.h>

#include <dlfcn.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>

namespace ebb::app {
namespace {

namespace fs = std::filesystem;

constexpr double kGigabyte = 1e9;

std::optional<std::string> first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) {
    return std::nullopt;
  }
  return line;
}

std::optional<double> number(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) {
    return std::nullopt;
  }
  return value;
}

/// Folders of this process's cgroup (version 2) from its own up to the root: a limit in any of them holds.
std::vector<fs::path> cgroup_folders(const Machine& machine) {
  std::vector<fs::path> folders;
  const fs::path top = machine.root / "sys/fs/cgroup";
  std::ifstream file(machine.root / "proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    if (line.starts_with("0::/")) {
      // A container may see a path that is not mounted for it; its own limits are then at the top.
      for (fs::path inside = line.substr(4); !inside.empty(); inside = inside.parent_path()) {
        folders.push_back(top / inside);
      }
    }
  }
  folders.push_back(top);
  return folders;
}

std::optional<double> memory_limit_bytes(const Machine& machine) {
  std::optional<double> least;
  const auto consider = [&](const fs::path& path) {
    if (const auto line = first_line(path)) {
      const auto limit = number(*line); // "max" is no number, so no limit
      // Version 1 writes "no limit" as a number near 2^63.
      if (limit && *limit < 1e18 && (!least || *limit < *least)) {
        least = limit;
      }
    }
  };
  for (const auto& folder : cgroup_folders(machine)) {
    consider(folder / "memory.max");
  }
  consider(machine.root / "sys/fs/cgroup/memory/memory.limit_in_bytes");
  return least;
}

std::optional<double> cpu_quota(const Machine& machine) {
  std::optional<double> least;
  const auto consider = [&](std::optional<double> quota, std::optional<double> period) {
    if (quota && period && *quota > 0 && *period > 0 && (!least || *quota / *period < *least)) {
      least = *quota / *period;
    }
  };
  for (const auto& folder : cgroup_folders(machine)) {
    if (const auto line = first_line(folder / "cpu.max")) {
      const auto space = line->find(' ');
      if (space != std::string::npos) {
        consider(number(std::string_view(*line).substr(0, space)), number(std::string_view(*line).substr(space + 1)));
      }
    }
  }
  const fs::path version1 = machine.root / "sys/fs/cgroup/cpu";
  const auto quota = first_line(version1 / "cpu.cfs_quota_us");
  const auto period = first_line(version1 / "cpu.cfs_period_us");
  if (quota && period) {
    consider(number(*quota), number(*period));
  }
  return least;
}

std::optional<double> meminfo_bytes(const Machine& machine, std::string_view key) {
  std::ifstream file(machine.root / "proc/meminfo");
  std::string line;
  while (std::getline(file, line)) {
    if (line.starts_with(key)) {
      return std::strtod(line.c_str() + key.size(), nullptr) * 1024;
    }
  }
  return std::nullopt;
}

/// Names of the GPUs as NVIDIA's own library tells them; empty when it is not there or finds none.
std::vector<std::string> gpus_by_nvml() {
  std::vector<std::string> names;
  void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    return names;
  }
  const auto init = reinterpret_cast<int (*)()>(dlsym(library, "nvmlInit_v2"));
  const auto shutdown = reinterpret_cast<int (*)()>(dlsym(library, "nvmlShutdown"));
  const auto count = reinterpret_cast<int (*)(unsigned*)>(dlsym(library, "nvmlDeviceGetCount_v2"));
  const auto handle = reinterpret_cast<int (*)(unsigned, void**)>(dlsym(library, "nvmlDeviceGetHandleByIndex_v2"));
  const auto name = reinterpret_cast<int (*)(void*, char*, unsigned)>(dlsym(library, "nvmlDeviceGetName"));
  if (init && shutdown && count && handle && name && init() == 0) {
    unsigned number_of_gpus = 0;
    if (count(&number_of_gpus) == 0) {
      for (unsigned i = 0; i < number_of_gpus; ++i) {
        void* device = nullptr;
        char text[96] = {};
        if (handle(i, &device) == 0 && name(device, text, sizeof(text)) == 0) {
          names.emplace_back(text);
        }
      }
    }
    shutdown();
  }
  dlclose(library);
  return names;
}

} // namespace

std::string_view name_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::kOk:
      return "ok";
    case Verdict::kWarn:
      return "warn";
    case Verdict::kFail:
      return "fail";
  }
  return "fail";
}

std::optional<std::string> Machine::get(const std::string& name) const {
  if (variable) {
    return variable(name);
  }
  const char* value = std::getenv(name.c_str());
  return value ? std::optional<std::string>(value) : std::nullopt;
}

Check check_cores(const Machine& machine) {
  Check check{.what = "cores"};
  cpu_set_t set;
  CPU_ZERO(&set);
  double cores = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
  check.value = fmt::format("{:g} usable", cores);
  if (const auto quota = cpu_quota(machine); quota && *quota < cores) {
    cores = *quota;
    check.value += fmt::format(", limited to {:g} by the cgroup", cores);
  }
  const auto threads = machine.get("OMP_NUM_THREADS");
  if (!threads) {
    check.value += "; OMP_NUM_THREADS unset: --nproc divides the cores among its ranks, other launchers may not";
    return check;
  }
  check.value += "; OMP_NUM_THREADS=" + *threads;
  const auto count = number(*threads);
  if (!count || *count < 1) {
    check.verdict = Verdict::kFail;
    check.remedy = "OMP_NUM_THREADS must be a number of threads, at least 1";
  } else if (*count > std::ceil(cores)) {
    check.verdict = Verdict::kWarn;
    check.remedy =
        fmt::format("more threads than cores: export OMP_NUM_THREADS={:g} or less", std::max(1.0, std::floor(cores)));
  }
  return check;
}

std::optional<double> usable_memory_bytes(const Machine& machine) {
  const auto total = meminfo_bytes(machine, "MemTotal:");
  const auto swap = meminfo_bytes(machine, "SwapTotal:");
  const auto limit = memory_limit_bytes(machine);
  if (!total) {
    return limit;
  }
  return std::min(*total + swap.value_or(0), limit.value_or(std::numeric_limits<double>::infinity()));
}

Check check_memory(const Machine& machine) {
  Check check{.what = "memory"};
  const auto available = meminfo_bytes(machine, "MemAvailable:");
  if (!available) {
    check.verdict = Verdict::kWarn;
    check.value = "unknown: /proc/meminfo does not tell";
    check.remedy = "mount /proc to see it";
    return check;
  }
  double usable = *available;
  check.value = fmt::format("{:.1f} GB available", *available / kGigabyte);
  if (const auto limit = memory_limit_bytes(machine); limit && *limit < usable) {
    usable = *limit;
    check.value += fmt::format(", limited to {:.1f} GB by the cgroup", *limit / kGigabyte);
  }
  // LibTorch alone takes a rank some 0.25 GB.
  if (usable < 2 * kGigabyte) {
    check.verdict = Verdict::kWarn;
    check.remedy = "under 2 GB: use fewer ranks on this host, or raise the limit";
  }
  return check;
}

Check check_disk(const Machine& machine) {
  Check check{.what = "disk"};
  struct statvfs info {};
  if (statvfs(machine.directory.c_str(), &info) != 0) {
    check.verdict = Verdict::kFail;
    check.value = fmt::format("{} cannot be examined", machine.directory.string());
    check.remedy = "run from a folder that exists and that you may read";
    return check;
  }
  const double free = static_cast<double>(info.f_bavail) * static_cast<double>(info.f_frsize);
  std::error_code ignored;
  check.value =
      fmt::format("{:.1f} GB free at {}", free / kGigabyte, fs::weakly_canonical(machine.directory, ignored).string());
  if (free < 0.2 * kGigabyte) {
    check.verdict = Verdict::kFail;
    check.remedy = "free some space, or give --run-dir on another disk";
  } else if (free < 5 * kGigabyte) {
    check.verdict = Verdict::kWarn;
    check.remedy = "a checkpoint takes 12 bytes a parameter; give --run-dir on a larger disk for large models";
  }
  return check;
}

Check check_open_files() {
  Check check{.what = "open files"};
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  check.value = limit.rlim_cur == RLIM_INFINITY ? "unlimited" : fmt::format("{} allowed", limit.rlim_cur);
  if (limit.rlim_cur < 1024) {
    check.verdict = Verdict::kWarn;
    check.remedy = "each rank holds a socket to every other: ulimit -n 4096";
  }
  return check;
}

Check check_gpus(const Machine& machine, bool built_with_cuda) {
  Check check{.what = "gpus"};
  std::vector<std::string> names = gpus_by_nvml();
  std::error_code ignored;
  if (names.empty()) {
    for (const auto& entry : fs::directory_iterator(machine.root / "proc/driver/nvidia/gpus", ignored)) {
      names.push_back(entry.path().filename().string());
    }
  }
  if (names.empty()) {
    check.value = "none";
    return check;
  }
  check.value = fmt::format("{}: {}", names.size(), names.front());
  for (std::size_t i = 1; i < names.size(); ++i) {
    check.value += ", " + names[i];
  }
  if (!built_with_cuda) {
    check.verdict = Verdict::kWarn;
    check.remedy = "this ebb computes on the CPU only: build the preset `cuda` to use them";
  }
  return check;
}

} // namespace ebb::app
