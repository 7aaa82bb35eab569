#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>

namespace ebb::train {

/// The largest resident set this process has had, in bytes (VmHWM of Linux, shared library pages included); 0 where the
/// system does not say.
std::int64_t peak_memory_bytes();

/// Runs `work` and returns the peak of memory in use while it ran, in bytes, what was there before included.
/// On the CPU that is this process's resident set (Linux): ranks that are threads of one process are counted together,
/// and the record of peak_memory_bytes() begins anew. On other devices it is what LibTorch's allocator holds reserved
/// there; what it has cached is given back first.
/// @throws NotImplementedError where the system does not let the peak be measured; what `work` throws.
std::int64_t peak_memory_bytes_of(const std::function<void()>& work, c10::Device device = c10::Device(c10::kCPU));

} // namespace ebb::train
