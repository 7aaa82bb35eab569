#include "ebb/train/batch_controller.h"

#include "ebb/base/error.h"
#include "ebb/shard/fully_shard.h"
#include "support/complaint.h"
#include "support/spawn_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>

namespace ebb::train {
namespace {

using ebb::test::complaint;

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(BatchController, FollowsAScheduleOfSteps) {
  BatchController controller(
      {.global_batch = 4, .max_micro_batch = 4, .schedule = {{2, 8}, {3, 12}, {5, 6}}}, comm::single());
  std::vector<std::int64_t> batches, steps;
  for (int step = 0; step < 7; ++step) {
    batches.push_back(controller.plan().global_batch);
    steps.push_back(controller.plan().accumulate);
    controller.step_done();
  }
  EXPECT_THAT(batches, ElementsAre(4, 4, 8, 12, 12, 6, 6));
  EXPECT_THAT(steps, ElementsAre(1, 1, 2, 3, 3, 2, 2));
}

TEST(BatchController, FollowsAScheduleOfTokens) {
  BatchController controller(
      {.global_batch = 2, .max_micro_batch = 8, .schedule = {{100, 4}, {200, 8}}, .clock = BatchClock::kTokens},
      comm::single());
  std::vector<std::int64_t> batches;
  for (const std::int64_t tokens : {60, 39, 1, 150, 0}) {
    batches.push_back(controller.plan().global_batch);
    controller.step_done(tokens);
  }
  EXPECT_THAT(batches, ElementsAre(2, 2, 2, 4, 8));
}

TEST(BatchController, RefusesOptionsThatMakeNoSense) {
  const auto wrong = [](BatchOptions options) { return complaint([&] { BatchController(options, comm::single()); }); };
  EXPECT_THAT(wrong({.global_batch = 0}), HasSubstr("at least 1, got 0"));
  EXPECT_THAT(wrong({.schedule = {{5, 2}, {5, 4}}}), HasSubstr("each later than the last, got 5 after 5"));
  EXPECT_THAT(wrong({.schedule = {{0, 2}}}), HasSubstr("got 0 after 0"));
  EXPECT_THAT(wrong({.schedule = {{5, 2}}, .noise = NoiseGrowth{}}), HasSubstr("choose one"));
  EXPECT_THAT(
      wrong({.global_batch = 8, .noise = NoiseGrowth{.max_global_batch = 4}}), HasSubstr("the first, 8, got 4"));
  EXPECT_THAT(wrong({.noise = NoiseGrowth{.factor = 1}}), HasSubstr("a factor of at least 2"));
  EXPECT_THAT(complaint([] { BatchController({}, nullptr); }), HasSubstr("the group of all ranks"));
  BatchController plain({}, comm::single());
  EXPECT_THAT(complaint([&] { plain.step_done(0, {1, 1, 1}); }), HasSubstr("BatchOptions::noise only"));
  EXPECT_THAT(complaint([&] { plain.step_done(-1); }), HasSubstr("at least 0 tokens"));
}

/// Squared norms of a problem with this noise scale and |G|^2 = 1, as `rank` of `ranks` would measure them.
GradientNorms norms_at(double noise_scale, const BatchPlan& plan, int ranks) {
  const double batch = static_cast<double>(plan.global_batch);
  return {.small_squared = 1 + noise_scale * ranks / batch, .big_squared = 1 + noise_scale / batch};
}

TEST(BatchController, GrowsWithTheNoiseScaleWithinItsBounds) {
  ebb::test::spawn_ranks(2, [](const std::shared_ptr<comm::Communicator>& world) {
    BatchController controller(
        {.global_batch = 4,
         .max_micro_batch = 4,
         .noise = NoiseGrowth{.max_global_batch = 50, .factor = 2, .patience = 3, .decay = 0}},
        world);
    std::vector<std::int64_t> batches;
    // The noise scale rises, falls, and rises beyond all bounds.
    for (const double scale :
         {7.0, 7.0, 7.0, 7.0, 8.0, 40.0, 40.0, 40.0, 2.0, 2.0, 2.0, 2.0, 1e6, 1e6, 1e6, 1e6, 1e6}) {
      const auto before = controller.plan();
      batches.push_back(before.global_batch);
      controller.step_done(0, norms_at(scale, before, world->size()));
      EXPECT_GE(controller.plan().global_batch, before.global_batch);
      EXPECT_EQ(controller.plan().micro_batch * controller.plan().accumulate * 2, controller.plan().global_batch);
    }
    // 7 is below 8; growth at once when 8 is reached; three measured steps each; 64 would be above 50.
    EXPECT_THAT(batches, ElementsAre(4, 4, 4, 4, 4, 8, 8, 8, 16, 16, 16, 16, 16, 32, 32, 32, 32));
    for (int step = 0; step < 5; ++step) {
      controller.step_done(0, norms_at(1e6, controller.plan(), world->size()));
    }
    EXPECT_EQ(controller.plan().global_batch, 32);
    EXPECT_NEAR(controller.noise().scale(), 1e6, 1);
  });
}

TEST(BatchController, MeasuresOnlyWhatCanBeMeasured) {
  BatchController controller(
      {.global_batch = 4, .max_micro_batch = 2, .noise = NoiseGrowth{.max_global_batch = 64, .patience = 1}},
      comm::single());
  // One rank's part is the whole step: no second batch size.
  EXPECT_THAT(
      complaint([&] { controller.step_done(0, {.small_squared = 2, .big_squared = 1}); }), HasSubstr("micro-steps"));
  EXPECT_EQ(controller.state().steps, 0);
  controller.step_done(
      0, {.small_squared = std::numeric_limits<double>::infinity(), .big_squared = 1, .small_batch = 2});
  controller.step_done(); // a step that was not measured
  EXPECT_EQ(controller.plan().global_batch, 4);
  EXPECT_EQ(controller.state().steps, 2);
  EXPECT_EQ(controller.state().measured_since_growth, 0);
  controller.step_done(0, {.small_squared = 1 + 100.0 / 2, .big_squared = 1 + 100.0 / 4, .small_batch = 2});
  EXPECT_EQ(controller.plan().global_batch, 8);
}

TEST(BatchController, HasTheSamePlanOnAllRanks) {
  ebb::test::spawn_ranks(3, [](const std::shared_ptr<comm::Communicator>& world) {
    const int rank = world->rank();
    BatchController controller(
        {.global_batch = 24,
         .max_micro_batch = rank == 1 ? 3 : 8, // one rank has less memory
         .noise = NoiseGrowth{.max_global_batch = 96, .patience = 1, .decay = 0}},
        world);
    EXPECT_EQ(controller.plan(), (BatchPlan{24, 2, 4}));
    // The ranks' own norms differ: only the mean of them calls for growth, 1 + 60 x 3 / 24 = 8.5.
    const double own[] = {0.5, 20, 5};
    controller.step_done(0, {.small_squared = own[rank], .big_squared = 1 + 60.0 / 24});
    EXPECT_NEAR(controller.noise().scale(), 60, 1e-9);
    EXPECT_EQ(controller.plan(), (BatchPlan{48, 2, 8}));
    controller.set_max_micro_batch(rank == 2 ? 8 : 100);
    EXPECT_EQ(controller.plan(), (BatchPlan{48, 8, 2}));
    EXPECT_THAT(complaint([&] { controller.set_max_micro_batch(rank); }), HasSubstr("at least 1"));
    EXPECT_EQ(controller.plan(), (BatchPlan{48, 8, 2}));
    EXPECT_THAT(
        complaint<IncompatibleStateError>(
            [&] { BatchController({.global_batch = rank == 2 ? 2'000'001 * 3 : 2'000'000 * 3}, world); }),
        HasSubstr("rank 2 differ from those of rank 0"));
  });
}

TEST(BatchController, ResumedPlansEqualThoseOfARunWithoutABreak) {
  const auto drive = [](BatchController& controller, bool measured, int from, int to) {
    std::vector<BatchPlan> plans;
    for (int step = from; step < to; ++step) {
      plans.push_back(controller.plan());
      if (!measured || step % 4 == 3) {
        controller.step_done(10 * controller.plan().global_batch);
        continue;
      }
      auto norms = norms_at(3.0 * step * (1 + 0.3 * std::sin(step)), controller.plan(), 4);
      norms.small_batch = controller.plan().global_batch / 4;
      controller.step_done(10 * controller.plan().global_batch, norms);
    }
    return plans;
  };
  const BatchOptions grows{
      .global_batch = 4, .max_micro_batch = 16, .noise = NoiseGrowth{.max_global_batch = 64, .patience = 3}};
  const BatchOptions by_tokens{
      .global_batch = 4, .max_micro_batch = 16, .schedule = {{300, 8}, {1000, 32}}, .clock = BatchClock::kTokens};
  for (const auto& options : {grows, by_tokens}) {
    const bool by_noise = options.noise.has_value();
    for (int pause = 0; pause < 30; ++pause) {
      BatchController whole(options, comm::single());
      whole.set_max_micro_batch(2);
      drive(whole, by_noise, 0, pause);
      const auto state = whole.state();
      const auto expected = drive(whole, by_noise, pause, 36);
      EXPECT_GE(whole.plan().global_batch, 32) << "nothing grew";

      BatchController resumed(options, comm::single());
      resumed.load(state);
      EXPECT_EQ(drive(resumed, by_noise, pause, 36), expected);
      EXPECT_EQ(resumed.noise().state().noise, whole.noise().state().noise);
      EXPECT_EQ(resumed.state().tokens, whole.state().tokens);
    }
  }
}

TEST(BatchController, RefusesAStateOfOtherOptions) {
  BatchController scheduled({.global_batch = 4, .schedule = {{10, 8}}}, comm::single());
  const auto refused = [](BatchController& controller, const BatchState& state) {
    return complaint<IncompatibleStateError>([&] { controller.load(state); });
  };
  EXPECT_EQ(refused(scheduled, {.steps = 10, .global_batch = 8}), "none");
  EXPECT_THAT(refused(scheduled, {.steps = 9, .global_batch = 8}), HasSubstr("8 after 9 steps"));
  EXPECT_THAT(refused(scheduled, {.steps = -1, .global_batch = 4}), HasSubstr("-1 steps"));
  BatchController growing({.global_batch = 4, .noise = NoiseGrowth{.max_global_batch = 40}}, comm::single());
  EXPECT_EQ(refused(growing, {.global_batch = 32}), "none");
  EXPECT_THAT(refused(growing, {.global_batch = 64}), HasSubstr("does not follow"));
  EXPECT_THAT(refused(growing, {.global_batch = 12}), HasSubstr("does not follow"));
  EXPECT_THAT(refused(growing, {.global_batch = 2}), HasSubstr("does not follow"));
}

torch::nn::Sequential tanh_model() {
  torch::manual_seed(8);
  torch::nn::Sequential model(torch::nn::Linear(6, 9), torch::nn::Tanh(), torch::nn::Linear(9, 2));
  model->to(at::kDouble);
  return model;
}

/// The samples of one rank in one step.
at::Tensor samples_of(std::int64_t step, int rank, std::int64_t count) {
  return at::arange(count * 6, at::kDouble).view({count, 6}).mul(0.37).add(0.9 * rank + 0.2 * step).sin();
}

/// What training on 2 ranks leaves behind: the parameters, and each step's plan.
struct Trained {
  std::vector<at::Tensor> parameters;
  std::vector<BatchPlan> plans;
};

/// The loop of docs/guide/sharding.md. Where `pause_at` is given, controller and momentum are saved and loaded there.
Trained train(std::int64_t max_micro_batch, std::optional<int> pause_at = {}) {
  std::vector<torch::nn::Sequential> models{tanh_model(), tanh_model()};
  Trained result;
  ebb::test::spawn_ranks(2, [&](const std::shared_ptr<comm::Communicator>& world) {
    const int rank = world->rank();
    auto& model = models[rank];
    LocalGradientNorm local;
    auto sharded = fully_shard(
        model, {.mesh = comm::Mesh(world), .wrap = shard::wrap_by_class({"Linear"}), .comm_hook = local.hook()});
    torch::optim::Adam optimizer(sharded.parameters(), 0.01);
    const BatchOptions options{
        .global_batch = 8,
        .max_micro_batch = max_micro_batch,
        .noise = NoiseGrowth{.max_global_batch = 48, .factor = 2, .patience = 4, .decay = 0.5}};
    auto controller = std::make_unique<BatchController>(options, world);
    for (int step = 0; step < 14; ++step) {
      if (pause_at == step) {
        const auto state = controller->state();
        controller = std::make_unique<BatchController>(options, world);
        controller->load(state);
      }
      const auto plan = controller->plan();
      const auto samples = samples_of(step, rank, plan.micro_batch * plan.accumulate);
      for (std::int64_t micro = 0; micro < plan.accumulate; ++micro) {
        std::optional<shard::NoSync> scope;
        if (micro + 1 < plan.accumulate) {
          scope.emplace(sharded.no_sync());
        }
        const auto x = samples.narrow(0, micro * plan.micro_batch, plan.micro_batch);
        const auto target = x.sum(1, true).sin();
        ((model->forward(x) - target).square().mean() / static_cast<double>(plan.accumulate)).backward();
      }
      const double norm = sharded.clip_grad_norm_(1.0);
      optimizer.step();
      sharded.zero_grad();
      controller->step_done(0, {.small_squared = local.take(), .big_squared = norm * norm});
      if (rank == 0) {
        result.plans.push_back(plan);
      }
    }
    const auto whole = sharded.full_parameters({.writeback = false});
    if (rank == 0) {
      for (const auto& parameter : model->parameters()) {
        result.parameters.push_back(parameter.detach().clone());
      }
    }
  });
  return result;
}

TEST(BatchController, TheMicroBatchDoesNotChangeTheResult) {
  const auto large = train(100);
  const auto small = train(2);
  ASSERT_EQ(large.plans.size(), small.plans.size());
  for (std::size_t step = 0; step < large.plans.size(); ++step) {
    EXPECT_EQ(large.plans[step].global_batch, small.plans[step].global_batch) << step;
    EXPECT_EQ(large.plans[step].accumulate, 1);
    EXPECT_EQ(small.plans[step].micro_batch, 2);
  }
  EXPECT_GT(large.plans.back().global_batch, large.plans.front().global_batch) << "nothing grew";
  for (std::size_t i = 0; i < large.parameters.size(); ++i) {
    EXPECT_LT((large.parameters[i] - small.parameters[i]).abs().max().item<double>(), 1e-9) << i;
  }
}

TEST(BatchController, TrainingAfterALoadEqualsTrainingWithoutABreak) {
  const auto whole = train(2);
  for (const int pause_at : {1, 5, 9}) {
    const auto resumed = train(2, pause_at);
    EXPECT_EQ(resumed.plans, whole.plans);
    for (std::size_t i = 0; i < whole.parameters.size(); ++i) {
      EXPECT_TRUE(resumed.parameters[i].equal(whole.parameters[i])) << i;
    }
  }
}

} // namespace
} // namespace ebb::train
