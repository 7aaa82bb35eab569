#include "ebb/train/train_job.h"

#include "support/spawn_ranks.h"
#include "tiny_training.h"

#include <gtest/gtest.h>

#include <mutex>

namespace ebb::train {
namespace {

using test::tiny_corpus;
using test::tiny_options;

/// Models are made before the ranks start: threads share LibTorch's generator.
std::vector<test::TinyModel> equal_models(int count) {
  std::vector<test::TinyModel> models;
  for (int i = 0; i < count; ++i) {
    models.emplace_back(1, 0.0);
  }
  return models;
}

TEST(TrainRanks, EvaluateAsOneProcessDoes) {
  const ebb::test::TemporaryFolder folder;
  const auto corpus = tiny_corpus(folder);
  auto options = tiny_options();
  options.eval_batches = 0;
  options.batch = 2;
  ASSERT_NE(corpus->num_windows(data::Split::kValidation) % 6, 0);
  auto models = equal_models(4);
  TrainJob alone({.model = test::trainable(models[3]), .corpus = corpus, .world = comm::single(), .options = options});
  const double expected = alone.evaluate();
  ebb::test::spawn_ranks(3, [&](const std::shared_ptr<comm::Communicator>& world) {
    TrainJob job(
        {.model = test::trainable(models[world->rank()]), .corpus = corpus, .world = world, .options = options});
    EXPECT_NEAR(job.evaluate(), expected, 1e-6) << "rank " << world->rank();
  });
}

TEST(TrainRanks, ReadTheGlobalBatchThatOneProcessReads) {
  const ebb::test::TemporaryFolder folder;
  const auto corpus = tiny_corpus(folder);
  auto options = tiny_options();
  options.eval_every = 0;
  options.steps = 1; // one step: with local parameters the ranks would part afterwards
  options.batch = 4;
  // Normalised by the running statistics: half a batch has others than the whole.
  const auto without_batch_statistics = [](test::TinyModel& model) {
    model->norm->eval();
    auto trainable = test::trainable(model);
    trainable.set_training = {};
    return trainable;
  };
  auto models = equal_models(3);
  const auto alone = std::make_shared<test::Recorder>();
  TrainJob({.model = without_batch_statistics(models[2]),
            .corpus = corpus,
            .world = comm::single(),
            .options = options,
            .observers = {alone}})
      .advance({});

  options.batch = 2;
  ebb::test::spawn_ranks(2, [&](const std::shared_ptr<comm::Communicator>& world) {
    const auto recorder = std::make_shared<test::Recorder>();
    TrainJob job(
        {.model = without_batch_statistics(models[world->rank()]),
         .corpus = corpus,
         .world = world,
         .options = options,
         .observers = {recorder}});
    job.advance({});
    EXPECT_NEAR(recorder->losses()[0], alone->losses()[0], 1e-6);
    EXPECT_EQ(recorder->steps[0].tokens, 32);
    EXPECT_EQ(recorder->steps[0].samples, 4);
    EXPECT_DOUBLE_EQ(recorder->steps[0].flops, alone->steps[0].flops / 2);
  });
}

TEST(TrainRanks, StopAtTheSameStepWhenOneIsAsked) {
  const ebb::test::TemporaryFolder folder;
  const auto corpus = tiny_corpus(folder);
  auto options = tiny_options();
  options.steps = 100'000;
  options.eval_every = 0;
  auto models = equal_models(3);
  std::mutex mutex;
  std::vector<std::int64_t> stopped_at;
  ebb::test::spawn_ranks(3, [&](const std::shared_ptr<comm::Communicator>& world) {
    TrainJob job(
        {.model = test::trainable(models[world->rank()]), .corpus = corpus, .world = world, .options = options});
    job.advance({.steps = 3, .seconds = {}});
    if (world->rank() == 1) {
      job.request_stop();
    }
    const auto status = job.advance({});
    EXPECT_TRUE(job.stop_agreed());
    const std::lock_guard lock(mutex);
    stopped_at.push_back(status.step);
  });
  EXPECT_EQ(stopped_at, (std::vector<std::int64_t>{4, 4, 4}));
}

} // namespace
} // namespace ebb::train
