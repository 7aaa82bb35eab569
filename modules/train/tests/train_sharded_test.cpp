#include "ebb/train/train_job.h"

#include "ebb/shard/fully_shard.h"
#include "ebb/shard/replicate.h"
#include "support/spawn_ranks.h"
#include "tiny_training.h"

#include <gtest/gtest.h>

#include <limits>

namespace ebb::train {
namespace {

using test::tiny_corpus;
using test::tiny_options;
using test::TinyModel;

/// Normalises by its running statistics, which no step changes: half a batch has others than the whole. No dropout.
TinyModel steady_model(std::int64_t seed) {
  TinyModel model(seed, 0.0);
  model->norm->eval();
  return model;
}

TrainableModel without_modes(TinyModel& model, std::shared_ptr<ParameterSet> parameters) {
  auto trainable = test::trainable(model);
  trainable.set_training = {};
  trainable.parameters = std::move(parameters);
  return trainable;
}

shard::ShardedModel sharded(TinyModel& model, const std::shared_ptr<comm::Communicator>& world) {
  return fully_shard(model, {.mesh = comm::Mesh(world), .wrap = shard::wrap_by_class({"Linear", "Embedding"})});
}

std::vector<Named> whole_copies(TinyModel& model) {
  std::vector<Named> copies;
  for (const auto& [name, tensor] : test::named_tensors(model->named_parameters())) {
    copies.emplace_back(name, tensor.detach().clone());
  }
  return copies;
}

double largest_difference(const std::vector<Named>& a, const std::vector<Named>& b) {
  double largest = a.size() == b.size() ? 0 : std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    largest = std::max(largest, (a[i].second - b[i].second).abs().max().item<double>());
  }
  return largest;
}

class TrainSharded : public ::testing::TestWithParam<int> {};

TEST_P(TrainSharded, EqualsOneProcessWithTheSameGlobalBatch) {
  const int world_size = GetParam();
  const ebb::test::TemporaryFolder folder;
  const auto corpus = tiny_corpus(folder);
  auto options = tiny_options();
  options.clip = 0.5; // low enough to clip
  options.batch = 12;
  auto alone = steady_model(1);
  TrainJob reference(
      {.model = without_modes(alone, local_parameters(test::named_tensors(alone->named_parameters()))),
       .corpus = corpus,
       .world = comm::single(),
       .options = options});
  const auto expected = reference.advance({});
  const auto expected_parameters = whole_copies(alone);

  options.batch = 12 / world_size;
  std::vector<TinyModel> models;
  for (int rank = 0; rank < world_size; ++rank) {
    models.push_back(steady_model(rank + 1)); // rank 0's is copied to all
  }
  ebb::test::spawn_ranks(world_size, [&](const std::shared_ptr<comm::Communicator>& world) {
    auto& model = models[world->rank()];
    auto shards = sharded(model, world);
    TrainJob job(
        {.model = without_modes(model, sharded_parameters(shards)),
         .corpus = corpus,
         .world = world,
         .options = options});
    const auto status = job.advance({});
    EXPECT_NEAR(status.metrics.at("loss"), expected.metrics.at("loss"), 1e-5);
    EXPECT_NEAR(status.metrics.at("grad_norm"), expected.metrics.at("grad_norm"), 1e-5);
    EXPECT_NEAR(status.metrics.at("eval/loss"), expected.metrics.at("eval/loss"), 1e-5);
    const auto scope = shards.full_parameters({.writeback = false});
    EXPECT_LT(largest_difference(whole_copies(model), expected_parameters), 1e-4);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, TrainSharded, ::testing::Values(1, 2, 3));

TEST(TrainSharded, AccumulatedMicroBatchesEqualOneBatch) {
  const ebb::test::TemporaryFolder folder;
  const auto corpus = tiny_corpus(folder);
  auto options = tiny_options();
  options.batch = 12;
  options.eval_batches = 0;
  auto alone = steady_model(1);
  TrainJob reference(
      {.model = without_modes(alone, local_parameters(test::named_tensors(alone->named_parameters()))),
       .corpus = corpus,
       .world = comm::single(),
       .options = options});
  const auto expected = reference.advance({});
  const auto expected_parameters = whole_copies(alone);

  options.batch = 2;
  options.accumulate = 3;
  std::vector<TinyModel> models{steady_model(1), steady_model(1), steady_model(1), steady_model(1)};
  ebb::test::spawn_ranks(2, [&](const std::shared_ptr<comm::Communicator>& world) {
    for (const bool shards : {true, false}) {
      auto& model = models[world->rank() + (shards ? 0 : 2)];
      const auto parameters = shards ? sharded_parameters(sharded(model, world))
                                     : replicated_parameters(replicate(model, {.mesh = comm::Mesh(world)}));
      TrainJob job({.model = without_modes(model, parameters), .corpus = corpus, .world = world, .options = options});
      const auto reduced = world->traffic().calls_of(comm::Op::kReduceScatter);
      const auto status = job.advance({});
      EXPECT_NEAR(status.metrics.at("loss"), expected.metrics.at("loss"), 1e-5);
      EXPECT_NEAR(status.metrics.at("grad_norm"), expected.metrics.at("grad_norm"), 1e-5);
      EXPECT_NEAR(status.metrics.at("eval/loss"), expected.metrics.at("eval/loss"), 1e-5);
      const auto per_step = (world->traffic().calls_of(comm::Op::kReduceScatter) - reduced) / options.steps;
      EXPECT_EQ(per_step, shards ? 3 : 0) << "one a unit, whatever the micro-batches";
    }
  });
}

TEST(TrainSharded, AScheduledBatchDoesNotDependOnItsMicroBatches) {
  const ebb::test::TemporaryFolder folder;
  const auto corpus = tiny_corpus(folder);
  auto options = tiny_options();
  options.batch = 24;
  options.batch_schedule = {"3:12", "7:48"};
  options.eval_batches = 0;
  const std::vector<std::int64_t> samples{24, 24, 24, 12, 12, 12, 12, 48, 48, 48, 48, 48};
  auto alone = steady_model(1);
  const auto recorder = std::make_shared<test::Recorder>();
  TrainJob reference(
      {.model = without_modes(alone, local_parameters(test::named_tensors(alone->named_parameters()))),
       .corpus = corpus,
       .world = comm::single(),
       .options = options,
       .observers = {recorder}});
  const auto expected = reference.advance({});
  const auto expected_parameters = whole_copies(alone);
  ASSERT_EQ(recorder->steps.size(), samples.size());
  for (std::size_t step = 0; step < samples.size(); ++step) {
    EXPECT_EQ(recorder->steps[step].samples, samples[step]);
    EXPECT_EQ(recorder->steps[step].tokens, samples[step] * 8);
  }

  options.batch = 4; // on 2 ranks 12 = 2 x 3 x 2: micro-batches of 3
  options.accumulate = 3;
  std::vector<TinyModel> models{steady_model(1), steady_model(1), steady_model(5), steady_model(5)};
  ebb::test::spawn_ranks(2, [&](const std::shared_ptr<comm::Communicator>& world) {
    const auto told = std::make_shared<test::Recorder>();
    const auto job_on = [&](TinyModel& model, const shard::ShardedModel& shards) {
      return std::make_unique<TrainJob>(TrainSetup{
          .model = without_modes(model, sharded_parameters(shards)),
          .corpus = corpus,
          .world = world,
          .options = options,
          .observers = {told}});
    };
    auto& model = models[world->rank()];
    auto shards = sharded(model, world);
    const auto job = job_on(model, shards);
    job->advance({.steps = 5, .seconds = {}});
    const auto paused = job->pause();
    const auto status = job->advance({});
    EXPECT_NEAR(status.metrics.at("loss"), expected.metrics.at("loss"), 1e-5);
    EXPECT_NEAR(status.metrics.at("eval/loss"), expected.metrics.at("eval/loss"), 1e-5);
    for (std::size_t step = 0; step < samples.size(); ++step) {
      EXPECT_EQ(told->steps.at(step).samples, samples[step]);
    }
    auto& resumed_model = models[2 + world->rank()];
    auto resumed_shards = sharded(resumed_model, world);
    const auto resumed = job_on(resumed_model, resumed_shards);
    resumed->resume(paused);
    resumed->advance({});
    const auto scope = shards.full_parameters({.writeback = false});
    const auto resumed_scope = resumed_shards.full_parameters({.writeback = false});
    EXPECT_LT(largest_difference(whole_copies(model), expected_parameters), 1e-4);
    EXPECT_EQ(largest_difference(whole_copies(resumed_model), whole_copies(model)), 0.0);
  });
}

TEST(TrainSharded, RefusesAScheduleThatRanksCannotShare) {
  const ebb::test::TemporaryFolder folder;
  const auto corpus = tiny_corpus(folder);
  auto options = tiny_options();
  for (const std::string wrong : {"5", "0:4"}) {
    auto model = steady_model(1);
    options.batch_schedule = {wrong};
    EXPECT_THROW(
        TrainJob(
            {.model = without_modes(model, local_parameters(test::named_tensors(model->named_parameters()))),
             .corpus = corpus,
             .world = comm::single(),
             .options = options}),
        c10::ValueError)
        << wrong;
  }
}

TEST(TrainShardedJob, PausedAndResumedEqualsTheUninterruptedRunBitForBit) {
  const ebb::test::TemporaryFolder folder;
  const auto corpus = tiny_corpus(folder);
  std::vector<TinyModel> whole, before, after;
  for (int rank = 0; rank < 2; ++rank) {
    whole.push_back(steady_model(1));
    before.push_back(steady_model(1));
    after.push_back(steady_model(50));
  }
  ebb::test::spawn_ranks(2, [&](const std::shared_ptr<comm::Communicator>& world) {
    const auto job_on = [&](TinyModel& model, const shard::ShardedModel& shards) {
      return std::make_unique<TrainJob>(TrainSetup{
          .model = without_modes(model, sharded_parameters(shards)),
          .corpus = corpus,
          .world = world,
          .options = tiny_options()});
    };
    auto& model = whole[world->rank()];
    auto shards = sharded(model, world);
    const auto expected = job_on(model, shards)->advance({});

    const auto paused_shards = sharded(before[world->rank()], world);
    const auto paused = job_on(before[world->rank()], paused_shards);
    paused->advance({.steps = 5, .seconds = {}});
    const auto state = paused->pause();
    paused->stop();

    auto& resumed_model = after[world->rank()];
    auto resumed_shards = sharded(resumed_model, world);
    const auto resumed = job_on(resumed_model, resumed_shards);
    resumed->resume(state);
    const auto status = resumed->advance({});
    EXPECT_EQ(status.metrics.at("loss"), expected.metrics.at("loss"));
    EXPECT_EQ(status.metrics.at("eval/loss"), expected.metrics.at("eval/loss"));
    const auto expected_scope = shards.full_parameters({.writeback = false});
    const auto scope = resumed_shards.full_parameters({.writeback = false});
    EXPECT_EQ(largest_difference(whole_copies(resumed_model), whole_copies(model)), 0.0);
  });
}

TEST(TrainReplicated, EqualsOneProcessWithTheSameGlobalBatch) {
  const ebb::test::TemporaryFolder folder;
  const auto corpus = tiny_corpus(folder);
  auto options = tiny_options();
  options.batch = 4;
  auto alone = steady_model(1);
  TrainJob reference(
      {.model = without_modes(alone, local_parameters(test::named_tensors(alone->named_parameters()))),
       .corpus = corpus,
       .world = comm::single(),
       .options = options});
  reference.advance({});
  const auto expected = whole_copies(alone);
  options.batch = 2;
  std::vector<TinyModel> models{steady_model(1), steady_model(2)};
  ebb::test::spawn_ranks(2, [&](const std::shared_ptr<comm::Communicator>& world) {
    auto& model = models[world->rank()];
    const auto copy = replicate(model, {.mesh = comm::Mesh(world)});
    TrainJob job(
        {.model = without_modes(model, replicated_parameters(copy)),
         .corpus = corpus,
         .world = world,
         .options = options});
    job.advance({});
    EXPECT_LT(largest_difference(whole_copies(model), expected), 1e-4);
  });
}

} // namespace
} // namespace ebb::train
