#pragma once

#include <torch/torch.h>

#include <cstdint>

namespace ebb::comm {

/// What rank r holds: the same at every rank that asks, different between ranks and elements, and not exact in sums.
inline at::Tensor values(int rank, std::int64_t count, at::ScalarType dtype, int salt = 0) {
  const auto place = at::arange(count, at::kInt) * (7919 + 104729 * rank) + (salt * 65537 + rank);
  const auto mixed = at::remainder(place, 20011) - 10007; // signed, without pattern for a reader's eye
  return at::isFloatingType(dtype) ? (mixed.to(at::kDouble) / 769).to(dtype) : mixed.to(dtype);
}

/// The sum that a program without ebb would take: rank by rank, then one division; half types in float.
inline at::Tensor summed(int size, std::int64_t count, at::ScalarType dtype, double divisor, int salt = 0) {
  const bool half = dtype == at::kBFloat16 || dtype == at::kHalf;
  auto sum = values(0, count, dtype, salt);
  if (half) {
    sum = sum.to(at::kFloat);
  }
  for (int rank = 1; rank < size; ++rank) {
    sum = sum + (half ? values(rank, count, dtype, salt).to(at::kFloat) : values(rank, count, dtype, salt));
  }
  if (divisor != 1) {
    sum = sum / divisor;
  }
  return sum.to(dtype);
}

} // namespace ebb::comm
