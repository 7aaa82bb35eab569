#pragma once

#include <cstdint>
#include <string_view>

namespace ebb::train {

/// CRC-32C (Castagnoli), as TFRecord files use it.
std::uint32_t crc32c(std::string_view bytes);

} // namespace ebb::train
