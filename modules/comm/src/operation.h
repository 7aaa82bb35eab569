#pragma once

#include "ebb/comm/communicator.h"

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <utility>

namespace ebb::comm {

/// One collective call: who must agree on what, and how errors name it.
struct Operation {
  Op op = Op::kBarrier;
  std::string unit;
  std::int64_t step = 0;
  std::uint64_t number = 0; ///< Counts the calls of a group, so it is the same at every rank.
  std::uint64_t watch_number = 0; ///< The same for Liveness.
  c10::ScalarType dtype = c10::ScalarType::Byte;
  std::int64_t bytes = 0; ///< Of the tensor that all ranks give.
  int detail = 0; ///< Broadcast: the root. Reductions: the ReduceOp.
};

/// "all_gather of unit 'layers.3' at step 12"
std::string describe(const Operation& operation);

// How all-reduces are taken apart, the same at every backend of our own, so that their traffic is too: up to this size
// everybody sends all to everybody (a second round trip costs more than the bytes); beyond, rank r sums chunk r.
inline constexpr std::int64_t kOnePhaseBytes = 2048;

/// Elements [first, second) of `count` that rank r of `size` sums.
std::pair<std::int64_t, std::int64_t> all_reduce_chunk(std::int64_t count, int r, int size);
/// What rank r sends to others.
std::int64_t all_reduce_bytes(std::int64_t count, std::int64_t element_bytes, int r, int size);

// Argument checks shared by all backends; `size` is the group's. Each names the unit and says what to pass.
void check_all_gather(
    const at::Tensor& output, const at::Tensor& input, int size, c10::DeviceType device, std::string_view unit);
void check_reduce_scatter(
    const at::Tensor& output, const at::Tensor& input, double divisor, int size, c10::DeviceType device,
    std::string_view unit);
void check_all_reduce(const at::Tensor& tensor, double divisor, c10::DeviceType device, std::string_view unit);
void check_broadcast(const at::Tensor& tensor, int root, int size, c10::DeviceType device, std::string_view unit);
void check_exchange(const std::string& mine);

} // namespace ebb::comm
