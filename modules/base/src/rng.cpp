#include "ebb/base/rng.h"

#include "ebb/base/error.h"

#include <numeric>
#include <utility>

namespace ebb {

Rng Rng::fork(std::string_view purpose) const {
  std::uint64_t hash = 0xcbf29ce484222325ULL; // FNV-1a
  for (const unsigned char c : purpose) {
    hash = (hash ^ c) * 0x100000001b3ULL;
  }
  Rng mixed(state_ ^ hash);
  return Rng(mixed.next());
}

std::uint64_t Rng::next() {
  std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ULL);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

std::uint64_t Rng::below(std::uint64_t bound) {
  TORCH_CHECK_VALUE(bound > 0, "[Rng::below] bound must be at least 1, got 0; check that the range is not empty");
  const std::uint64_t limit = bound * (UINT64_MAX / bound);
  std::uint64_t value = next();
  while (value >= limit) {
    value = next();
  }
  return value % bound;
}

double Rng::uniform() {
  return static_cast<double>(next() >> 11) * 0x1.0p-53;
}

std::vector<std::int64_t> Rng::permutation(std::int64_t count) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  for (std::int64_t i = count - 1; i > 0; --i) {
    std::swap(order[i], order[below(static_cast<std::uint64_t>(i) + 1)]);
  }
  return order;
}

} // namespace ebb
