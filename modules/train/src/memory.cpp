#include "ebb/train/memory.h"

#include <fstream>
#include <limits>
#include <string>

namespace ebb::train {

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

} // namespace ebb::train
