#pragma once

#include "operation.h"

#include <cstdint>
#include <cstring>
#include <string>

namespace ebb::comm {

/// What ranks tell each other at the start of each operation, so that a program that calls different things at
/// different ranks gets an error and not another operation's bytes. Plain bytes.
struct OperationHeader {
  std::uint64_t number = 0;
  std::int64_t bytes = 0;
  std::int32_t op = 0;
  std::int32_t dtype = 0;
  std::int32_t detail = 0;
  char unit[64] = {}; ///< Shortened. Compared too: units of equal size, used in another order, would trade values.

  OperationHeader() = default;
  explicit OperationHeader(const Operation& operation);
  bool agrees_with(const OperationHeader& other) const {
    return number == other.number && bytes == other.bytes && op == other.op && dtype == other.dtype &&
           detail == other.detail && std::strncmp(unit, other.unit, sizeof(unit)) == 0;
  }
  /// "all_gather of unit 'layers.3', 4096 bytes of Float"
  std::string text() const;
};

} // namespace ebb::comm
