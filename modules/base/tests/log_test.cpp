#include "ebb/base/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

namespace ebb::log {
namespace {

using ::testing::ElementsAre;

std::vector<std::tuple<Level, int, std::string>> lines;

void keep(Level level, int rank, std::string_view text) {
  lines.emplace_back(level, rank, text);
}

class Log : public ::testing::Test {
 protected:
  void SetUp() override {
    lines.clear();
    set_level(Level::kInfo);
    set_sink(keep);
  }
  void TearDown() override {
    set_sink(nullptr);
  }
};

TEST_F(Log, FormatsAndKeepsTheLevel) {
  info("step {} of {}", 3, 10);
  warn("careful");
  error("{:.2f}", 1.5);
  EXPECT_THAT(
      lines, ElementsAre(
                 std::tuple(Level::kInfo, rank(), "step 3 of 10"), std::tuple(Level::kWarn, rank(), "careful"),
                 std::tuple(Level::kError, rank(), "1.50")));
}

TEST_F(Log, DropsWhatIsBelowTheLevel) {
  debug("unseen");
  set_level(Level::kError);
  warn("unseen");
  EXPECT_FALSE(enabled(Level::kWarn));
  EXPECT_TRUE(enabled(Level::kError));
  set_level(Level::kOff);
  error("unseen");
  set_level(Level::kDebug);
  debug("seen");
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(std::get<2>(lines[0]), "seen");
}

TEST_F(Log, ForgetsARankThatIsTakenBack) {
  std::thread([] {
    set_rank(3);
    EXPECT_EQ(rank(), 3);
    set_rank(-1);
    EXPECT_EQ(rank(), -1) << "neither the thread's nor the process's";
    set_rank(4);
    EXPECT_EQ(rank(), 4);
    set_rank(-1);
  }).join();
  EXPECT_EQ(rank(), -1);
}

TEST_F(Log, EveryThreadShowsItsOwnRank) {
  for (const int wanted : {0, 1, 2}) {
    std::thread([wanted] {
      set_rank(wanted);
      info("hello");
    }).join();
  }
  ASSERT_EQ(lines.size(), 3u);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(std::get<1>(lines[i]), i);
  }
}

TEST_F(Log, OtherThreadsShowTheRankThatWasSetFirst) {
  std::thread([] { set_rank(5); }).join();
  const int first = rank(); // of the process, by this or an earlier test
  EXPECT_GE(first, 0);
  std::thread([] { set_rank(6); }).join();
  std::thread([] { info("from a worker"); }).join();
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(std::get<1>(lines[0]), first);
}

// A fresh process, since the level is read once.
[[noreturn]] void exit_with_levels(const char* setting) {
  if (setting) {
    ::setenv("EBB_LOG", setting, 1);
  } else {
    ::unsetenv("EBB_LOG");
  }
  int seen = 0;
  for (const Level level : {Level::kDebug, Level::kInfo, Level::kWarn, Level::kError}) {
    seen += enabled(level) ? 1 : 0;
  }
  std::_Exit(seen);
}

TEST(LogLevelDeathTest, ComesFromEbbLog) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(exit_with_levels("debug"), ::testing::ExitedWithCode(4), "");
  EXPECT_EXIT(exit_with_levels("info"), ::testing::ExitedWithCode(3), "");
  EXPECT_EXIT(exit_with_levels(nullptr), ::testing::ExitedWithCode(3), "");
  EXPECT_EXIT(exit_with_levels("warn"), ::testing::ExitedWithCode(2), "");
  EXPECT_EXIT(exit_with_levels("error"), ::testing::ExitedWithCode(1), "");
  EXPECT_EXIT(exit_with_levels("off"), ::testing::ExitedWithCode(0), "");
  EXPECT_EXIT(exit_with_levels("loud"), ::testing::ExitedWithCode(3), "EBB_LOG=loud is not a level");
}

TEST(LogSinkDeathTest, WritesTimeLevelAndRankToStandardError) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  const auto write_line = [](int rank_or_none) {
    set_sink(nullptr);
    if (rank_or_none >= 0) {
      set_rank(rank_or_none);
    }
    warn("text {}", "{braces}");
    std::_Exit(0);
  };
  EXPECT_EXIT(
      write_line(3), ::testing::ExitedWithCode(0),
      "\\[[0-9]+:[0-9]+:[0-9]+\\.[0-9]+\\] .*warn.*\\[rank 3\\] text \\{braces\\}");
  EXPECT_EXIT(write_line(-1), ::testing::ExitedWithCode(0), "\\] text \\{braces\\}");
}

} // namespace
} // namespace ebb::log
