#include "ebb/train/schedule.h"

#include <gtest/gtest.h>

namespace ebb::train {
namespace {

TEST(LearningRate, RisesOverTheWarmUpThenFallsAlongACosine) {
  const TrainOptions options{.steps = 111, .lr = 1.0, .min_lr = 0.1, .warmup = 10};
  EXPECT_DOUBLE_EQ(learning_rate(options, 0), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(options, 4), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate(options, 9), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(options, 10), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(options, 60), 0.55); // half way
  EXPECT_DOUBLE_EQ(learning_rate(options, 110), 0.1); // the last step
  EXPECT_DOUBLE_EQ(learning_rate(options, 500), 0.1);
  for (int step = 11; step <= 110; ++step) {
    EXPECT_LT(learning_rate(options, step), learning_rate(options, step - 1));
  }
}

TEST(LearningRate, NeedsNoWarmUpAndSurvivesOneLongerThanTheRun) {
  EXPECT_DOUBLE_EQ(learning_rate({.steps = 10, .lr = 1.0, .min_lr = 0.0, .warmup = 0}, 0), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate({.steps = 1, .lr = 1.0, .min_lr = 0.0, .warmup = 0}, 0), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate({.steps = 2, .lr = 1.0, .min_lr = 0.0, .warmup = 50}, 1), 1.0);
}

TEST(LearningRate, EndsAtATenthOfThePeakUnlessToldOtherwise) {
  EXPECT_DOUBLE_EQ(learning_rate({.steps = 10, .lr = 0.5, .warmup = 0}, 9), 0.05);
  EXPECT_DOUBLE_EQ(learning_rate({.steps = 10, .lr = 0.5, .min_lr = 0.25, .warmup = 0}, 9), 0.25);
}

} // namespace
} // namespace ebb::train
