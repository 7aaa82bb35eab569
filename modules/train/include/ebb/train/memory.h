#pragma once

#include <cstdint>

namespace ebb::train {

/// The largest resident set this process has had, in bytes (VmHWM of Linux, shared library pages included); 0 where the
/// system does not say.
std::int64_t peak_memory_bytes();

} // namespace ebb::train
