#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace ebb {

/// Random numbers that are the same on every platform and at every world size (SplitMix64; the distributions of the C++
/// standard library are not). For shuffles and seeds; tensors draw from LibTorch's own generators.
class Rng {
 public:
  explicit Rng(std::uint64_t seed) : state_(seed) {}

  /// A stream of its own for each purpose, so that one more draw here does not shift the draws there.
  Rng fork(std::string_view purpose) const;

  /// Uniform over all 64-bit numbers.
  std::uint64_t next();
  /// Uniform in [0, bound), without modulo bias; bound > 0.
  std::uint64_t below(std::uint64_t bound);
  /// Uniform in [0, 1).
  double uniform();
  /// 0 .. count-1 in random order (Fisher-Yates).
  std::vector<std::int64_t> permutation(std::int64_t count);

  std::uint64_t state() const {
    return state_;
  }
  /// Goes on from what state() gave.
  void set_state(std::uint64_t state) {
    state_ = state;
  }

 private:
  std::uint64_t state_;
};

} // namespace ebb
