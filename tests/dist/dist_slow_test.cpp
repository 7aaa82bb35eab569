#include "job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>

// The same with the options that users get: a stopped peer is named within 30 s, a busy one never.
namespace ebb::test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::SizeIs;

TEST(DistSlow, AStoppedRankIsNamedWithinThirtySeconds) {
  Job job({EBB_DIST_RANK, "launch", "3", "1000", "2000", "steps", "1000000", "10"});
  for (const char* rank : {"0", "1", "2"}) {
    ASSERT_NE(job.wait_for(std::string("rank ") + rank + " is stepping"), "") << job.output();
  }
  ::kill(job.pid_of_rank(1), SIGSTOP);
  const auto stopped = std::chrono::steady_clock::now();
  EXPECT_NE(job.wait_for("RankLostError 1: "), "") << job.output();
  EXPECT_LT(std::chrono::steady_clock::now() - stopped, 30s);
  EXPECT_EQ(job.wait(), 4) << job.output();
  EXPECT_THAT(job.lines_with("RankLostError 1: "), SizeIs(testing::Ge(2))) << job.output();
}

TEST(DistSlow, ARankZeroInEvaluationForAMinuteIsNoErrorButAWarning) {
  Job job({EBB_DIST_RANK, "launch", "3", "1000", "2000", "busy", "0", "60"});
  EXPECT_EQ(job.wait(120s), 0) << job.output();
  EXPECT_THAT(job.lines_with("done, sum 9"), SizeIs(3)) << job.output();
  // Ranks 1 and 2 warn once, after 30 s, and name what rank 0 did last.
  EXPECT_THAT(
      job.lines_with("waiting for 30"),
      AllOf(SizeIs(2), Each(AllOf(HasSubstr("rank 0 (alive"), HasSubstr("'before'")))))
      << job.output();
}

} // namespace
} // namespace ebb::test
