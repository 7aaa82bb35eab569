#pragma once

#include "ebb/comm/communicator.h"

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>

namespace ebb::comm {

/// One collective call: who must agree on what, and how errors name it.
struct Operation {
  Op op = Op::kBarrier;
  std::string unit;
  std::int64_t step = 0;
  std::uint64_t number = 0; ///< Counts the calls of a group, so it is the same at every rank.
  c10::ScalarType dtype = c10::ScalarType::Byte;
  std::int64_t bytes = 0; ///< Of the tensor that all ranks give.
  int detail = 0; ///< Broadcast: the root. Reductions: the ReduceOp.
};

/// "all_gather of unit 'layers.3' at step 12"
std::string describe(const Operation& operation);

/// What is compared between ranks: "all_gather of unit 'layers.3', 4096 bytes of Float".
std::string describe_contents(Op op, const std::string& unit, std::int64_t bytes, c10::ScalarType dtype, int detail);

// Argument checks shared by all backends; `size` is the group's. Each names the unit and says what to pass.
void check_all_gather(const at::Tensor& output, const at::Tensor& input, int size, c10::DeviceType device, std::string_view unit);
void check_reduce_scatter(
    const at::Tensor& output, const at::Tensor& input, double divisor, int size, c10::DeviceType device, std::string_view unit);
void check_all_reduce(const at::Tensor& tensor, double divisor, c10::DeviceType device, std::string_view unit);
void check_broadcast(const at::Tensor& tensor, int root, int size, c10::DeviceType device, std::string_view unit);
void check_exchange(const std::string& mine);

} // namespace ebb::comm
