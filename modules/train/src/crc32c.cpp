#include "crc32c.h"

#include <array>

namespace ebb::train {
namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78; // bits reversed

constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) {
      value = (value >> 1) ^ ((value & 1) ? kPolynomial : 0);
    }
    table[byte] = value;
  }
  return table;
}

constexpr auto kTable = make_table();

} // namespace

std::uint32_t crc32c(std::string_view bytes) {
  std::uint32_t value = ~std::uint32_t{0};
  for (const char c : bytes) {
    value = (value >> 8) ^ kTable[(value ^ static_cast<std::uint8_t>(c)) & 0xff];
  }
  return ~value;
}

} // namespace ebb::train
