#include "ebb/train/batch_schedule.h"
#include "support/complaint.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

namespace ebb::train {
namespace {

using ebb::test::complaint;

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(BatchPlan, CutsTheGlobalBatchExactly) {
  EXPECT_EQ(plan_batch(24, 4, 2), (BatchPlan{24, 4, 3}));
  EXPECT_EQ(plan_batch(24, 5, 2), (BatchPlan{24, 4, 3})); // 5 does not divide 12
  EXPECT_EQ(plan_batch(24, 100, 2), (BatchPlan{24, 12, 1}));
  EXPECT_EQ(plan_batch(62, 16, 2), (BatchPlan{62, 1, 31}));
  for (std::int64_t batch = 1; batch <= 60; ++batch) {
    for (std::int64_t most = 1; most <= 12; ++most) {
      for (int ranks = 1; ranks <= 4; ++ranks) {
        const auto plan = plan_batch(batch * ranks, most, ranks);
        EXPECT_EQ(plan.micro_batch * plan.accumulate * ranks, batch * ranks);
        EXPECT_LE(plan.micro_batch, most);
        for (auto larger = plan.micro_batch + 1; larger <= most; ++larger) {
          EXPECT_NE(batch % larger, 0) << larger << " would do";
        }
      }
    }
  }
}

TEST(BatchPlan, RefusesWhatRanksCannotShareEqually) {
  EXPECT_THAT(
      complaint([] { plan_batch(10, 4, 3); }),
      AllOf(HasSubstr("3 ranks can share equally, got 10"), HasSubstr("such as 12")));
  EXPECT_THAT(complaint([] { plan_batch(0, 4, 1); }), HasSubstr("at least 1, got 0, 4 and 1"));
}

TEST(BatchSchedule, IsReadFromText) {
  EXPECT_THAT(parse_batch_schedule({"10:64", "200:128"}), ElementsAre(BatchStage{10, 64}, BatchStage{200, 128}));
  for (const std::string wrong :
       {"", ":", "10", "10:", ":64", "10:64:1", "ten:64", "10:64x", "10: 64", "-1:64", "10:-64", "1e3:64",
        "99999999999999999999:64"}) {
    EXPECT_THAT(
        complaint([&] {
          parse_batch_schedule({"5:8", wrong});
        }),
        AllOf(HasSubstr("expected STEP:SAMPLES"), HasSubstr("got '" + wrong + "'")));
  }
}

TEST(BatchSchedule, MustAscendAndBeSharedEqually) {
  const auto wrong = [](const std::vector<BatchStage>& schedule) {
    return complaint([&] { check_batch_schedule(schedule, 2); });
  };
  EXPECT_EQ(wrong({{1, 8}, {2, 4}}), "none");
  EXPECT_THAT(wrong({{5, 2}, {5, 4}}), HasSubstr("got 5 after 5"));
  EXPECT_THAT(wrong({{0, 2}}), HasSubstr("got 0 after 0"));
  EXPECT_THAT(wrong({{7, 3}}), HasSubstr("from 7 on that 2 rank(s) can share equally, got 3"));
  EXPECT_THAT(wrong({{7, 0}}), HasSubstr("got 0"));
}

TEST(BatchSchedule, HoldsFromTheStepOfEachStage) {
  const std::vector<BatchStage> schedule{{2, 8}, {5, 4}};
  std::vector<std::int64_t> batches;
  for (int done = 0; done < 7; ++done) {
    batches.push_back(scheduled_batch(schedule, 1, done));
  }
  EXPECT_THAT(batches, ElementsAre(1, 1, 8, 8, 8, 4, 4));
}

} // namespace
} // namespace ebb::train
