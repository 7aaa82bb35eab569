#include "socket_operation.h"

namespace ebb::comm {

// What ranks must agree on is mixed in, so that transfers of ranks that disagree never meet: Gloo ends the process where
// a message is longer than its receiver expects. Headers always meet, and tell.
int tag_of(const Operation& operation, Stream stream) {
  constexpr std::uint64_t kNumDtypes = 256;
  std::uint64_t mixed = 0;
  if (stream != kHeader) {
    mixed = static_cast<std::uint64_t>(operation.bytes);
    mixed = mixed * kNumOps + static_cast<std::uint64_t>(operation.op);
    mixed = mixed * kNumDtypes + static_cast<std::uint64_t>(operation.dtype);
    mixed *= 0x9E3779B97F4A7C15ULL;
  }
  // 14 bits of number, 3 of stream, 14 of agreement.
  return static_cast<int>((operation.number & 0x3fff) << 17 | static_cast<std::uint64_t>(stream) << 14 | mixed >> 50);
}

} // namespace ebb::comm
