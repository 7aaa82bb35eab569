#pragma once

#include <cstdint>

/// What this process occupies, as the kernel counts it. All figures in kB (1024 bytes) of resident memory.
namespace ebb::bench {

std::int64_t resident_kb();

/// Highest resident_kb() since reset_peak(), or since the start.
std::int64_t peak_kb();
void reset_peak();

/// Returns freed heap to the kernel, so that later figures do not depend on what set-up once used.
void trim();

/// User and system time of all threads of this process.
double cpu_seconds();

} // namespace ebb::bench
