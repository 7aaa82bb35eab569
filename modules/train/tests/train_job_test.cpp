#include "ebb/train/train_job.h"

#include "ebb/base/error.h"
#include "ebb/train/schedule.h"
#include "tiny_training.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace ebb::train {
namespace {

using test::bit_equal;
using test::tiny_corpus;
using test::tiny_options;
using test::TrainingRun;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// A driver that knows nothing but Job: runs it in slices of 1, 2, 3, ... steps, and moves it to a new job after each.
template <class MakeJob>
std::vector<JobStatus> drive_in_slices(MakeJob&& make_job) {
  std::vector<JobStatus> history;
  std::shared_ptr<const JobState> state;
  for (std::int64_t slice = 1;; ++slice) {
    Job& job = make_job();
    if (state) {
      job.resume(state);
    }
    history.push_back(job.advance({.steps = slice, .seconds = {}}));
    if (history.back().finished) {
      return history;
    }
    state = job.pause();
    EXPECT_EQ(state->step(), history.back().step);
    // What the paused job does from here on must not change the state.
    job.advance({.steps = 1, .seconds = {}});
    job.stop();
  }
}

TEST(TrainJob, PausedResumedAndStoppedEqualsTheUninterruptedRunBitForBit) {
  const ebb::test::TemporaryFolder folder;
  const auto corpus = tiny_corpus(folder);
  TrainingRun whole(corpus, tiny_options());
  const auto final = whole.job->advance({});
  ASSERT_TRUE(final.finished);
  ASSERT_EQ(final.step, 12);

  std::vector<std::unique_ptr<TrainingRun>> runs;
  const auto history = drive_in_slices([&]() -> Job& {
    // All but the first start from another model and another generator: the state must bring its own.
    const std::int64_t model_seed = runs.empty() ? 1 : 100 + static_cast<std::int64_t>(runs.size());
    runs.push_back(std::make_unique<TrainingRun>(corpus, tiny_options(), model_seed));
    if (runs.size() > 1) {
      torch::manual_seed(model_seed);
    }
    return *runs.back()->job;
  });
  ASSERT_EQ(history.size(), 5u); // 1 + 2 + 3 + 4 + 2 steps
  EXPECT_EQ(history[2].step, 6);
  EXPECT_TRUE(bit_equal(runs.back()->model, whole.model));
  EXPECT_EQ(history.back().metrics.at("loss"), final.metrics.at("loss"));
  EXPECT_EQ(history.back().metrics.at("eval/loss"), final.metrics.at("eval/loss"));
  EXPECT_EQ(runs.back()->recorder->texts, whole.recorder->texts);
  EXPECT_EQ(runs.back()->job->totals().tokens, 12 * 4 * 8);

  std::vector<double> losses;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const auto& steps = runs[i]->recorder->steps;
    const auto slice = std::min(i + 1, steps.size());
    for (std::size_t step = 0; step < slice; ++step) {
      losses.push_back(steps[step].metrics.at("loss"));
    }
  }
  EXPECT_EQ(losses, whole.recorder->losses());
}

TEST(TrainJob, LearnsAndReportsWhatItDid) {
  const ebb::test::TemporaryFolder folder;
  auto options = tiny_options();
  options.steps = 60;
  options.lr = 0.05;
  TrainingRun run(tiny_corpus(folder), options, 1, /*dropout=*/0.0);
  run.job->advance({});
  const auto losses = run.recorder->losses();
  EXPECT_NEAR(losses.front(), std::log(256.0), 0.7);
  EXPECT_LT(losses.back(), 0.6 * losses.front());
  const auto& step = run.recorder->steps[2];
  EXPECT_EQ(step.step, 3);
  EXPECT_EQ(step.samples, 4);
  EXPECT_EQ(step.tokens, 32);
  const double parameters = 256 * 6 + 6 + 6 + 6 * 256 + 256;
  EXPECT_DOUBLE_EQ(step.flops, 32 * (6 * parameters + 100));
  EXPECT_DOUBLE_EQ(step.metrics.at("lr"), learning_rate(options, 2));
  EXPECT_GT(step.metrics.at("grad_norm"), 0);
  EXPECT_GT(step.metrics.at("tokens_per_second"), 0);
  EXPECT_GT(step.metrics.at("peak_memory_bytes"), 10e6);
}

TEST(TrainJob, TellsItsObserversInOrder) {
  const ebb::test::TemporaryFolder folder;
  auto options = tiny_options();
  options.steps = 3;
  options.eval_every = 2;
  options.sample_every = 3;
  TrainingRun run(tiny_corpus(folder), options);
  run.job->advance({.steps = 1, .seconds = {}});
  run.job->advance({});
  run.job->advance({});
  run.job->stop();
  EXPECT_THAT(
      run.recorder->events, ElementsAre(
                                "begin 3 steps, 3340 parameters", "offline training", "step 1", "step 2", "metrics 2",
                                "step 3", "metrics 3", "sample 3", "end: done"));
}

TEST(TrainJob, DoesNothingOnceStopped) {
  const ebb::test::TemporaryFolder folder;
  TrainingRun run(tiny_corpus(folder), tiny_options());
  run.job->advance({.steps = 2, .seconds = {}});
  run.job->stop();
  const auto status = run.job->advance({});
  EXPECT_TRUE(status.finished);
  EXPECT_EQ(status.step, 2);
  EXPECT_EQ(run.recorder->events.back(), "end: stopped");
  EXPECT_EQ(run.recorder->steps.size(), 2u);
}

TEST(TrainJob, EndsAnAdvanceWhenItsTimeIsUsed) {
  const ebb::test::TemporaryFolder folder;
  ScriptedClock clock;
  struct Ticker : Observer {
    explicit Ticker(ScriptedClock& clock) : clock(clock) {}
    void on_step(const StepInfo&) override {
      clock.advance(std::chrono::seconds(10));
    }
    ScriptedClock& clock;
  };
  auto model = test::TinyModel(1, 0.5);
  TrainJob job(
      {.model = test::trainable(model),
       .corpus = tiny_corpus(folder),
       .world = comm::single(),
       .options = tiny_options(),
       .observers = {std::make_shared<Ticker>(clock)},
       .clock = &clock});
  // Looked at before each step, at 0, 10, 20 and 30 seconds; the step that finds the time used is the last.
  EXPECT_EQ(job.advance({.steps = {}, .seconds = 25.0}).step, 4);
  EXPECT_EQ(job.advance({.steps = {}, .seconds = 0.0}).step, 5);
  EXPECT_EQ(job.advance({.steps = 2, .seconds = 1000.0}).step, 7);
  EXPECT_TRUE(job.advance({.steps = {}, .seconds = 1000.0}).finished);
}

TEST(TrainJob, StopsAfterTheStepWhenAsked) {
  const ebb::test::TemporaryFolder folder;
  TrainingRun run(tiny_corpus(folder), tiny_options());
  run.job->advance({.steps = 3, .seconds = {}});
  EXPECT_FALSE(run.job->stop_agreed());
  run.job->request_stop();
  const auto status = run.job->advance({});
  EXPECT_EQ(status.step, 4);
  EXPECT_FALSE(status.finished); // the caller may still pause it
  EXPECT_TRUE(run.job->stop_agreed());
}

TEST(TrainJob, StopsInTheMiddleOfALongSampleOrEvaluation) {
  const ebb::test::TemporaryFolder folder;
  for (const bool in_sample : {true, false}) {
    auto options = tiny_options();
    options.batch = 1;
    options.steps = 2;
    options.eval_every = options.sample_every = 1;
    options.eval_batches = in_sample ? 1 : 0;
    options.sample_length = 1000;
    auto model = test::TinyModel(1, 0.0);
    auto trainable = test::trainable(model);
    TrainJob* asked = nullptr;
    int forwards = 0;
    const auto count = [&](bool ask) {
      if (!at::GradMode::is_enabled()) {
        ++forwards;
        if (ask) {
          asked->request_stop();
        }
      }
    };
    trainable.logits = [&, inner = trainable.logits](const at::Tensor& x) {
      count(in_sample);
      return inner(x);
    };
    trainable.loss = [&, inner = trainable.loss](const at::Tensor& x, const at::Tensor& y) {
      count(!in_sample);
      return inner(x, y);
    };
    const auto recorder = std::make_shared<test::Recorder>();
    TrainJob job(
        {.model = trainable,
         .corpus = tiny_corpus(folder, 0.5),
         .world = comm::single(),
         .options = options,
         .observers = {recorder}});
    asked = &job;
    const auto status = job.advance({});
    EXPECT_EQ(status.step, 1);
    EXPECT_TRUE(job.stop_agreed());
    EXPECT_LT(forwards, 50) << "of 1000 bytes, or of a hundred windows";
    EXPECT_EQ(recorder->evaluations.size(), in_sample ? 1U : 0U);
  }
}

TEST(TrainJob, NeitherEvaluatesNorSamplesOnceAStopIsAgreed) {
  const ebb::test::TemporaryFolder folder;
  auto options = tiny_options();
  options.eval_every = options.sample_every = 1;
  TrainingRun run(tiny_corpus(folder), options);
  run.job->request_stop();
  EXPECT_EQ(run.job->advance({}).step, 1);
  EXPECT_THAT(run.recorder->evaluations, ElementsAre());
  EXPECT_THAT(run.recorder->texts, ElementsAre());
}

TEST(TrainJob, GivesNoLossOfAnEvaluationCutShort) {
  const ebb::test::TemporaryFolder folder;
  auto options = tiny_options();
  options.batch = 1;
  options.eval_batches = 0;
  TrainingRun run(tiny_corpus(folder, 0.5), options);
  run.job->request_stop();
  EXPECT_TRUE(std::isnan(run.job->evaluate()));
  EXPECT_TRUE(run.job->stop_agreed());
}

TEST(TrainJob, NamesTheStepWhoseLossIsNotFinite) {
  const ebb::test::TemporaryFolder folder;
  auto model = test::TinyModel(1, 0.0);
  auto trainable = test::trainable(model);
  int calls = 0;
  trainable.loss = [&, plain = trainable.loss](const at::Tensor& x, const at::Tensor& y) {
    return ++calls == 3 ? plain(x, y) * std::nan("") : plain(x, y);
  };
  const auto recorder = std::make_shared<test::Recorder>();
  TrainJob job(
      {.model = trainable,
       .corpus = tiny_corpus(folder),
       .world = comm::single(),
       .options = tiny_options(),
       .observers = {recorder}});
  try {
    job.advance({});
    FAIL() << "nothing was thrown";
  } catch (const c10::Error& error) {
    EXPECT_THAT(message_of(error), AllOf(HasSubstr("nan at step 3"), HasSubstr("lower the learning rate")));
  }
  EXPECT_THAT(recorder->events.back(), HasSubstr("end: failed: [TrainJob] the loss is nan"));
  EXPECT_TRUE(job.advance({}).finished);
}

TEST(TrainJob, EvaluatesTheWholeValidationTextWithoutGradients) {
  const ebb::test::TemporaryFolder folder;
  const auto corpus = tiny_corpus(folder);
  auto options = tiny_options();
  options.eval_batches = 0;
  options.batch = 5; // does not divide the number of windows
  TrainingRun run(corpus, options);
  const auto count = corpus->num_windows(data::Split::kValidation);
  ASSERT_GT(count, 12);
  ASSERT_NE(count % 5, 0);

  torch::NoGradGuard no_grad;
  run.model->eval();
  double expected = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto window = data::make_batch(*corpus, data::Split::kValidation, {i});
    expected +=
        next_token_loss(run.model(window.tokens_BT), window.targets_BT).item<double>() / static_cast<double>(count);
  }
  run.model->train();
  EXPECT_NEAR(run.job->evaluate(), expected, 1e-6);
  EXPECT_FALSE(run.model->is_training());
  for (const auto& parameter : run.model->parameters()) {
    EXPECT_FALSE(parameter.grad().defined());
  }
}

TEST(TrainJob, SkipsEvaluationWhereThereIsNoValidationText) {
  const ebb::test::TemporaryFolder folder;
  TrainingRun run(tiny_corpus(folder, /*validation=*/0.0), tiny_options());
  const auto status = run.job->advance({});
  EXPECT_TRUE(status.finished);
  EXPECT_EQ(status.metrics.count("eval/loss"), 0u);
  EXPECT_TRUE(std::isnan(run.job->evaluate()));
}

TEST(TrainJob, RefusesAStateOfAnotherJobAndStaysAsItWas) {
  const ebb::test::TemporaryFolder folder;
  const auto corpus = tiny_corpus(folder);
  TrainingRun paused(corpus, tiny_options());
  paused.job->advance({.steps = 4, .seconds = {}});
  const auto state = paused.job->pause();

  auto options = tiny_options();
  options.lr = 0.02;
  TrainingRun other(corpus, options, /*model_seed=*/9);
  TrainingRun untouched(corpus, options, /*model_seed=*/9);
  try {
    other.job->resume(state);
    FAIL() << "nothing was thrown";
  } catch (const IncompatibleStateError& error) {
    EXPECT_THAT(message_of(error), AllOf(HasSubstr("lr"), HasSubstr("0.02"), HasSubstr("0.01")));
  }
  EXPECT_TRUE(bit_equal(other.model, untouched.model));
  EXPECT_EQ(other.job->step(), 0);

  struct Foreign : JobState {
    std::int64_t step() const override {
      return 4;
    }
  };
  EXPECT_THROW(other.job->resume(std::make_shared<Foreign>()), IncompatibleStateError);
  EXPECT_THROW(other.job->resume(nullptr), IncompatibleStateError);

  auto small = test::trainable(test::TinyModel(1, 0.5));
  small.parameters = local_parameters({small.parameters->named()[0]});
  TrainJob fewer({.model = small, .corpus = corpus, .world = comm::single(), .options = tiny_options()});
  EXPECT_THROW(fewer.resume(state), IncompatibleStateError);
}

TEST(TrainJob, SaysThatItCannotResize) {
  const ebb::test::TemporaryFolder folder;
  TrainingRun run(tiny_corpus(folder), tiny_options());
  EXPECT_THROW(run.job->resize(4), c10::NotImplementedError);
}

TEST(TrainJob, RefusesOptionsOutOfRange) {
  const ebb::test::TemporaryFolder folder;
  const auto corpus = tiny_corpus(folder);
  auto options = tiny_options();
  options.min_lr = 1.0;
  EXPECT_THROW(TrainingRun(corpus, options), c10::ValueError);
  options = tiny_options();
  options.prompt = "";
  EXPECT_THROW(TrainingRun(corpus, options), c10::ValueError);
  options = tiny_options();
  options.optimizer = "lbfgs";
  EXPECT_THROW(TrainingRun(corpus, options), c10::ValueError);
}

TEST(TrainJob, RefusesAModelWithNothingToTrain) {
  const ebb::test::TemporaryFolder folder;
  test::TinyModel model(1, 0.0);
  for (auto& parameter : model->parameters()) {
    parameter.set_requires_grad(false);
  }
  EXPECT_THROW(
      TrainJob(
          {.model = test::trainable(model),
           .corpus = tiny_corpus(folder),
           .world = comm::single(),
           .options = tiny_options()}),
      c10::ValueError);
}

TEST(NextTokenLoss, RefusesLogitsOfAnotherShape) {
  const auto targets = torch::zeros({2, 3}, torch::kLong);
  EXPECT_NEAR(next_token_loss(torch::zeros({2, 3, 256}), targets).item<double>(), std::log(256.0), 1e-5);
  EXPECT_THROW(next_token_loss(torch::zeros({2, 256}), targets), c10::ValueError);
  EXPECT_THROW(next_token_loss(torch::zeros({3, 2, 256}), targets), c10::ValueError);
}

} // namespace
} // namespace ebb::train
