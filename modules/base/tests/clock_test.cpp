#include "ebb/base/clock.h"

#include <gtest/gtest.h>

#include <ctime>

namespace ebb {
namespace {

using namespace std::chrono_literals;

TEST(Clock, TheRealOneNeverGoesBack) {
  const auto& clock = Clock::real();
  auto last = clock.now();
  for (int i = 0; i < 1000; ++i) {
    const auto now = clock.now();
    EXPECT_GE(now, last);
    last = now;
  }
}

TEST(Clock, TheRealOneKnowsTheCalendar) {
  const auto before = std::time(nullptr);
  const auto wall = std::chrono::system_clock::to_time_t(Clock::real().wall());
  EXPECT_GE(wall, before - 1);
  EXPECT_LE(wall, std::time(nullptr) + 1);
}

TEST(Clock, TheScriptedOneMovesOnlyWhenTold) {
  ScriptedClock clock;
  const auto start = clock.now();
  const auto calendar = clock.wall();
  EXPECT_EQ(clock.now(), start);
  clock.advance(1500ms);
  EXPECT_EQ(clock.now() - start, 1500ms);
  EXPECT_EQ(clock.wall() - calendar, 1500ms);
  EXPECT_DOUBLE_EQ(seconds_between(start, clock.now()), 1.5);
  EXPECT_DOUBLE_EQ(seconds_between(clock.now(), start), -1.5);
}

} // namespace
} // namespace ebb
