#include "ebb/train/memory.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <fstream>
#include <limits>
#include <string>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace ebb::train {
namespace {

std::int64_t peak_resident_bytes_of(const std::function<void()>& work) {
#ifdef __GLIBC__
  malloc_trim(0); // what earlier work has freed is not this work's
#endif
  std::ofstream refs("/proc/self/clear_refs");
  refs << "5" << std::flush; // resets VmHWM: proc(5)
  TORCH_CHECK_NOT_IMPLEMENTED(
      refs.good() && peak_memory_bytes() > 0,
      "[peak_memory_bytes_of] expected a system on which /proc/self/clear_refs resets the peak of the resident set "
      "(Linux with CONFIG_PROC_PAGE_MONITOR); measure the peak in another way");
  work();
  return peak_memory_bytes();
}

} // namespace

std::int64_t peak_memory_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string key; status >> key;) {
    if (key == "VmHWM:") {
      std::int64_t kilobytes = 0;
      status >> kilobytes;
      return kilobytes * 1024;
    }
    status.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return 0;
}

std::int64_t peak_memory_bytes_of(const std::function<void()>& work, c10::Device device) {
  if (device.is_cpu()) {
    return peak_resident_bytes_of(work);
  }
  auto* allocator = at::getDeviceAllocator(device.type());
  const auto index = device.has_index() ? device.index() : c10::DeviceIndex(0);
  allocator->emptyCache();
  allocator->resetPeakStats(index);
  work();
  return allocator->getDeviceStats(index).reserved_bytes[0].peak; // [0]: over all pools
}

} // namespace ebb::train
