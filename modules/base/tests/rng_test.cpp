#include "ebb/base/rng.h"

#include <c10/util/Exception.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>

namespace ebb {
namespace {

using ::testing::ElementsAre;

// The golden values were worked out by another implementation in another language; the first three are also those that
// the author of SplitMix64 publishes for this seed.
TEST(Rng, DrawsTheSameNumbersOnEveryPlatform) {
  Rng rng(1234567);
  EXPECT_EQ(rng.next(), 6457827717110365317ULL);
  EXPECT_EQ(rng.next(), 3203168211198807973ULL);
  EXPECT_EQ(rng.next(), 9817491932198370423ULL);
}

TEST(Rng, PermutesTheSameOnEveryPlatform) {
  EXPECT_THAT(Rng(42).permutation(10), ElementsAre(0, 9, 5, 8, 6, 4, 7, 2, 1, 3));
}

TEST(Rng, UniformIsTheSameOnEveryPlatform) {
  EXPECT_EQ(Rng(7).uniform(), 0x1.8f2f879164c82p-2);
}

TEST(Rng, ForksTheSameOnEveryPlatform) {
  EXPECT_EQ(Rng(42).fork("shuffle").state(), 10000225485979118302ULL);
  EXPECT_EQ(Rng(42).fork("split").state(), 11380159506012374609ULL);
}

TEST(Rng, PermutationHoldsEveryNumberOnce) {
  Rng rng(1);
  for (const std::int64_t count : {0, 1, 2, 3, 1000}) {
    auto order = rng.permutation(count);
    std::sort(order.begin(), order.end());
    ASSERT_EQ(static_cast<std::int64_t>(order.size()), count);
    for (std::int64_t i = 0; i < count; ++i) {
      EXPECT_EQ(order[i], i);
    }
  }
}

TEST(Rng, PermutationReachesEveryOrderAboutEquallyOften) {
  Rng rng(5);
  std::array<int, 6> counts{};
  for (int i = 0; i < 6000; ++i) {
    const auto order = rng.permutation(3);
    ++counts[order[0] * 2 + (order[1] > order[2] ? 1 : 0)];
  }
  for (const int count : counts) {
    EXPECT_NEAR(count, 1000, 150); // five standard deviations
  }
}

TEST(Rng, ForksDependOnThePurposeAndNotOnDrawsOfOtherForks) {
  const Rng rng(42);
  Rng first = rng.fork("shuffle");
  first.next();
  EXPECT_EQ(rng.fork("shuffle").next(), Rng(42).fork("shuffle").next());
  EXPECT_NE(rng.fork("shuffle").next(), rng.fork("shuffled").next());
  EXPECT_NE(rng.fork("shuffle").next(), Rng(43).fork("shuffle").next());
}

TEST(Rng, BelowStaysBelowAndReachesAll) {
  Rng rng(3);
  std::set<std::uint64_t> seen;
  for (int i = 0; i < 500; ++i) {
    const auto value = rng.below(7);
    EXPECT_LT(value, 7u);
    seen.insert(value);
  }
  EXPECT_EQ(seen.size(), 7u);
  EXPECT_EQ(rng.below(1), 0u);
  EXPECT_THROW(rng.below(0), c10::ValueError);
}

TEST(Rng, UniformStaysWithinItsRange) {
  Rng rng(3);
  double sum = 0;
  for (int i = 0; i < 10000; ++i) {
    const double value = rng.uniform();
    ASSERT_GE(value, 0.0);
    ASSERT_LT(value, 1.0);
    sum += value;
  }
  EXPECT_NEAR(sum / 10000, 0.5, 0.015);
}

TEST(Rng, GoesOnFromASavedState) {
  Rng rng(9);
  rng.next();
  const auto state = rng.state();
  const auto value = rng.next();
  Rng other(0);
  other.set_state(state);
  EXPECT_EQ(other.next(), value);
}

} // namespace
} // namespace ebb
