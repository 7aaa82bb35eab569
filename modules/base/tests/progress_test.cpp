#include "ebb/base/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>
#include <vector>

namespace ebb {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

struct Screen {
  ScriptedClock clock;
  std::ostringstream out;

  ProgressOptions terminal() const {
    return {.terminal = true, .width = 100, .clock = &clock};
  }
  ProgressOptions plain() const {
    return {.terminal = false, .clock = &clock};
  }
  /// What was drawn since the last call, one entry a drawing, without the control characters.
  std::vector<std::string> drawings() {
    std::vector<std::string> found;
    std::string text = out.str();
    out.str("");
    std::replace(text.begin(), text.end(), '\n', '\r');
    std::istringstream parts(text);
    for (std::string part; std::getline(parts, part, '\r');) {
      if (part.starts_with("\x1b[K")) {
        part.erase(0, 3);
      }
      if (!part.empty()) {
        found.push_back(part);
      }
    }
    return found;
  }
};

TEST(Progress, ShowsNothingForShortWork) {
  Screen screen;
  for (const auto& options : {screen.terminal(), screen.plain()}) {
    Progress progress(10, "steps", screen.out, options);
    for (int step = 1; step <= 10; ++step) {
      screen.clock.advance(190ms);
      progress.update(step);
    }
    progress.finish();
    EXPECT_EQ(screen.out.str(), "");
  }
}

TEST(Progress, DrawsABarWithSpeedAndTimeLeft) {
  Screen screen;
  Progress progress(300, "steps", screen.out, screen.terminal());
  screen.clock.advance(40s);
  progress.update(120, "loss 1.73");
  EXPECT_EQ(screen.out.str(), "\r\x1b[K[########------------]  40% 120/300 steps, 3.0 steps/s, 1:00 left, loss 1.73\r");
}

TEST(Progress, DrawsAtMostTenTimesASecond) {
  Screen screen;
  Progress progress(100000, "steps", screen.out, screen.terminal());
  screen.clock.advance(2s);
  for (int step = 0; step < 1000; ++step) { // one second
    progress.update(step);
    screen.clock.advance(1ms);
  }
  EXPECT_EQ(screen.drawings().size(), 10u);
}

TEST(Progress, PrintsALineEveryTenSecondsWithoutATerminal) {
  Screen screen;
  Progress progress(100, "steps", screen.out, screen.plain());
  for (int step = 1; step <= 35; ++step) {
    screen.clock.advance(1s);
    progress.update(step);
  }
  EXPECT_THAT(
      screen.drawings(), ElementsAre(
                             " 10% 10/100 steps, 1.0 steps/s, 1:30 left", " 20% 20/100 steps, 1.0 steps/s, 1:20 left",
                             " 30% 30/100 steps, 1.0 steps/s, 1:10 left"));
  progress.finish();
  EXPECT_THAT(screen.drawings(), ElementsAre(" 35% 35/100 steps, 1.0 steps/s, took 0:35"));
}

TEST(Progress, WritesNoControlCharactersWithoutATerminal) {
  Screen screen;
  {
    Progress progress(100, "steps", screen.out, screen.plain());
    screen.clock.advance(11s);
    progress.update(50);
  }
  EXPECT_THAT(screen.out.str(), Not(HasSubstr("\r")));
  EXPECT_THAT(screen.out.str(), Not(HasSubstr("\x1b")));
}

TEST(Progress, FinishKeepsTheLastStateAndComesOnce) {
  Screen screen;
  {
    Progress progress(100, "steps", screen.out, screen.terminal());
    screen.clock.advance(3s);
    progress.update(99);
    progress.update(100, "done"); // too early for a drawing of its own
    progress.finish();
    progress.finish();
    progress.update(50);
  }
  EXPECT_THAT(screen.out.str(), EndsWith("[####################] 100% 100/100 steps, 33 steps/s, took 0:03, done\n"));
  EXPECT_EQ(screen.drawings().size(), 2u);
}

TEST(Progress, EndsTheLineWhenItIsDropped) {
  Screen screen;
  {
    Progress progress(100, "steps", screen.out, screen.terminal());
    screen.clock.advance(3s);
    progress.update(10);
  }
  EXPECT_THAT(screen.out.str(), EndsWith("\n"));
}

TEST(Progress, NeverWrapsTheLine) {
  Screen screen;
  auto options = screen.terminal();
  options.width = 40;
  Progress progress(100, "steps", screen.out, options);
  screen.clock.advance(3s);
  progress.update(10, std::string(200, 'x'));
  const auto drawn = screen.drawings();
  ASSERT_EQ(drawn.size(), 1u);
  EXPECT_EQ(drawn[0].size(), 39u);
}

TEST(Progress, CountsWithoutATotal) {
  Screen screen;
  Progress progress(0, "rows", screen.out, screen.terminal());
  screen.clock.advance(10s);
  progress.update(5000);
  EXPECT_THAT(screen.drawings(), ElementsAre("5000 rows, 500 rows/s"));
}

TEST(Progress, StaysAFullBarBeyondTheTotal) {
  Screen screen;
  Progress progress(10, "steps", screen.out, screen.terminal());
  screen.clock.advance(10s);
  progress.update(20);
  EXPECT_THAT(screen.drawings(), ElementsAre("[####################] 100% 20/10 steps, 2.0 steps/s, 0:00 left"));
}

TEST(Progress, GivesSpeedsTwoDigits) {
  Screen screen;
  for (const auto& [done, text] : std::vector<std::pair<std::int64_t, std::string>>{
           {5, ", 0.05 "}, {314, ", 3.1 "}, {9970, ", 100 "}, {123456, ", 1235 "}}) {
    Progress progress(0, "rows", screen.out, screen.terminal());
    screen.clock.advance(100s);
    progress.update(done);
    EXPECT_THAT(screen.out.str(), HasSubstr(text + "rows/s"));
  }
}

TEST(Progress, WritesHoursOut) {
  Screen screen;
  Progress progress(7200, "steps", screen.out, screen.terminal());
  screen.clock.advance(10s);
  progress.update(10);
  EXPECT_THAT(screen.out.str(), HasSubstr("1:59:50 left"));
}

} // namespace
} // namespace ebb
