#include "ebb/train/console_observer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

namespace ebb::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(ConsoleObserver, ShowsLossSpeedAndValidationAndSamplesWithoutControlCharacters) {
  ScriptedClock clock;
  std::ostringstream progress, text;
  ConsoleObserver observer(progress, text, {.terminal = false, .width = 160, .clock = &clock});
  RunInfo info;
  info.planned_steps = 4;
  observer.on_run_begin(info);
  const auto step = [&](std::int64_t number, double loss) {
    clock.advance(std::chrono::seconds(11));
    StepInfo step;
    step.step = number;
    step.metrics = {
        {"loss", loss},
        {"tokens_per_second", 12345},
        {"tflops", 0.0421},
        {"grad_norm", 1.2345},
        {"peak_memory_bytes", 321.4e6}};
    observer.on_step(step);
  };
  step(1, 2.0);
  EXPECT_THAT(
      progress.str(),
      AllOf(
          HasSubstr("1/4 steps"),
          HasSubstr("loss 2.000, gradient norm 1.23, 12.3k tokens/s, 0.042 TFLOPS, peak memory 321 MB a rank"),
          Not(HasSubstr("validation"))));
  observer.on_metrics(1, {{"eval/loss", 1.875}});
  step(2, 1.0);
  EXPECT_THAT(progress.str(), HasSubstr("loss 1.950, validation 1.875"));
  observer.on_text(2, "sample", "Emma\x1b[2J");
  EXPECT_THAT(text.str(), AllOf(HasSubstr("sample after step 2:\nEmma?[2J\n"), Not(HasSubstr("\x1b"))));
  observer.on_text(4, "sample", "the last");
  EXPECT_THAT(text.str(), Not(HasSubstr("the last")));
  observer.on_run_end("done");
}

} // namespace
} // namespace ebb::train
