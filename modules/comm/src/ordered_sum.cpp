#include "ordered_sum.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace ebb::comm {
namespace {

// Small enough that the accumulators of a block stay in the first-level cache.
constexpr std::size_t kBlock = 1024;

struct BFloat16Bits {
  std::uint16_t bits;
};

template <class T>
auto widen(T value) {
  return value;
}
inline float widen(BFloat16Bits value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}
inline float widen(c10::Half value) {
  return static_cast<float>(value);
}

template <class T, class A>
T narrow(A value) {
  return static_cast<T>(value);
}
template <>
inline BFloat16Bits narrow<BFloat16Bits, float>(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16; // to nearest, ties to even
  return {static_cast<std::uint16_t>((bits & 0x7fffffffU) > 0x7f800000U ? 0x7fc0U : rounded)};
}

template <class A>
A add(A a, A b) {
  if constexpr (std::is_integral_v<A>) { // wraps like LibTorch's integers, without undefined behaviour
    return static_cast<A>(static_cast<std::make_unsigned_t<A>>(a) + static_cast<std::make_unsigned_t<A>>(b));
  } else {
    return a + b;
  }
}

template <class A>
A larger(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    return a > b ? a : b;
  } else {
    return a > b || a != a ? a : b;
  }
}

// Multiplying by an exact reciprocal rounds the same real number as dividing does, several times faster.
bool has_exact_reciprocal(double divisor) {
  int exponent = 0;
  return std::abs(std::frexp(divisor, &exponent)) == 0.5 && std::abs(exponent) < 100;
}

enum class Scale { kNone, kMultiply, kDivide };

template <Scale scale, class A>
A scaled(A value, A by) {
  if constexpr (scale == Scale::kMultiply) {
    return value * by;
  } else if constexpr (scale == Scale::kDivide) {
    return value / by;
  } else {
    return value;
  }
}

// All sources in one pass. `ivdep` tells the compiler that `out` overlaps a source nowhere but at the same element.
template <Scale scale, int num_sources, class T, class A>
void sum_in_one_pass(T* out, const T* const* sources, std::size_t count, A by) {
  const T* source[num_sources];
  std::copy_n(sources, num_sources, source);
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) {
    A sum = widen(source[0][i]);
    for (int s = 1; s < num_sources; ++s) {
      sum = add(sum, static_cast<A>(widen(source[s][i])));
    }
    out[i] = narrow<T>(scaled<scale>(sum, by));
  }
}

template <Scale scale, class T, class A>
void combine_scaled(T* out, const T* const* sources, int num_sources, std::size_t count, ReduceOp op, A by) {
  if (op == ReduceOp::kSum) {
    switch (num_sources) {
      case 1:
        return sum_in_one_pass<scale, 1>(out, sources, count, by);
      case 2:
        return sum_in_one_pass<scale, 2>(out, sources, count, by);
      case 3:
        return sum_in_one_pass<scale, 3>(out, sources, count, by);
      case 4:
        return sum_in_one_pass<scale, 4>(out, sources, count, by);
      default:
        break;
    }
  }
  A sum[kBlock];
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t n = std::min(kBlock, count - begin);
    for (std::size_t i = 0; i < n; ++i) {
      sum[i] = widen(sources[0][begin + i]);
    }
    for (int s = 1; s < num_sources; ++s) {
      const T* next = sources[s] + begin;
      if (op == ReduceOp::kSum) {
        for (std::size_t i = 0; i < n; ++i) {
          sum[i] = add(sum[i], static_cast<A>(widen(next[i])));
        }
      } else {
        for (std::size_t i = 0; i < n; ++i) {
          sum[i] = larger(sum[i], static_cast<A>(widen(next[i])));
        }
      }
    }
    for (std::size_t i = 0; i < n; ++i) {
      out[begin + i] = narrow<T>(scaled<scale>(sum[i], by));
    }
  }
}

template <class T>
void combine(void* out, const void* const* sources, int num_sources, std::size_t count, ReduceOp op, double divisor) {
  using A = decltype(widen(T{}));
  auto* to = static_cast<T*>(out);
  const auto* from = reinterpret_cast<const T* const*>(sources);
  if constexpr (!std::is_integral_v<A>) {
    if (divisor != 1 && has_exact_reciprocal(divisor)) {
      return combine_scaled<Scale::kMultiply>(to, from, num_sources, count, op, static_cast<A>(1 / divisor));
    }
    if (divisor != 1) {
      return combine_scaled<Scale::kDivide>(to, from, num_sources, count, op, static_cast<A>(divisor));
    }
  }
  combine_scaled<Scale::kNone>(to, from, num_sources, count, op, A{1});
}

} // namespace

bool can_combine(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float:
    case c10::ScalarType::Double:
    case c10::ScalarType::BFloat16:
    case c10::ScalarType::Half:
    case c10::ScalarType::Int:
    case c10::ScalarType::Long:
      return true;
    default:
      return false;
  }
}

void combine_in_order(
    void* out, const void* const* sources, int num_sources, std::size_t count, c10::ScalarType dtype, ReduceOp op,
    double divisor) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return combine<float>(out, sources, num_sources, count, op, divisor);
    case c10::ScalarType::Double:
      return combine<double>(out, sources, num_sources, count, op, divisor);
    case c10::ScalarType::BFloat16:
      return combine<BFloat16Bits>(out, sources, num_sources, count, op, divisor);
    case c10::ScalarType::Half:
      return combine<c10::Half>(out, sources, num_sources, count, op, divisor);
    case c10::ScalarType::Int:
      return combine<std::int32_t>(out, sources, num_sources, count, op, divisor);
    case c10::ScalarType::Long:
      return combine<std::int64_t>(out, sources, num_sources, count, op, divisor);
    default:
      TORCH_INTERNAL_ASSERT(false, "combine_in_order: dtype ", dtype);
  }
}

c10::ScalarType sum_dtype_of(c10::ScalarType dtype) {
  const bool half = dtype == c10::ScalarType::BFloat16 || dtype == c10::ScalarType::Half;
  return half ? c10::ScalarType::Float : dtype;
}

void widen_halves(float* out, const void* halves, std::size_t count, c10::ScalarType dtype) {
  const auto widen_all = [&](const auto* from) {
    for (std::size_t i = 0; i < count; ++i) {
      out[i] = widen(from[i]);
    }
  };
  if (dtype == c10::ScalarType::BFloat16) {
    widen_all(static_cast<const BFloat16Bits*>(halves));
  } else {
    widen_all(static_cast<const c10::Half*>(halves));
  }
}

void narrow_to_halves(void* out, const float* sums, std::size_t count, c10::ScalarType dtype) {
  const auto narrow_all = [&]<class T>(T* to) {
    for (std::size_t i = 0; i < count; ++i) {
      to[i] = narrow<T>(sums[i]);
    }
  };
  if (dtype == c10::ScalarType::BFloat16) {
    narrow_all(static_cast<BFloat16Bits*>(out));
  } else {
    narrow_all(static_cast<c10::Half*>(out));
  }
}

} // namespace ebb::comm
