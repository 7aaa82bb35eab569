#include "harness/process_memory.h"

#include <c10/util/Exception.h>

#include <malloc.h>
#include <sys/resource.h>

#include <fstream>
#include <string>

namespace ebb::bench {
namespace {

std::int64_t status_kb(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == field) {
      std::int64_t kb = 0;
      status >> kb;
      return kb;
    }
    std::getline(status, word);
  }
  TORCH_CHECK(false, "[status_kb] /proc/self/status has no field ", field, "; these benchmarks need Linux with procfs");
}

double seconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
}

} // namespace

std::int64_t resident_kb() {
  return status_kb("VmRSS:");
}

std::int64_t peak_kb() {
  return status_kb("VmHWM:");
}

void reset_peak() {
  std::ofstream refs("/proc/self/clear_refs");
  refs << "5" << std::flush;
  TORCH_CHECK(refs, "[reset_peak] cannot write /proc/self/clear_refs; the kernel must have CONFIG_PROC_PAGE_MONITOR");
}

void trim() {
  malloc_trim(0);
}

double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

} // namespace ebb::bench
