#include "ebb/train/gradient_noise.h"

#include "ebb/shard/fully_shard.h"
#include "support/spawn_ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <random>

namespace ebb::train {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(GradientNoise, SolvesForGradientAndNoiseFromTwoBatchSizes) {
  // |G|^2 = 3 and S = 40, so that squared norms are 3 + 40 / b.
  GradientNoise noise(0.9);
  EXPECT_TRUE(std::isnan(noise.scale()));
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(noise.update(3 + 40.0 / 4, 4, 3 + 40.0 / 16, 16));
    EXPECT_NEAR(noise.squared_gradient(), 3, 1e-12); // from the first update on: the start at 0 is corrected for
    EXPECT_NEAR(noise.noise(), 40, 1e-12);
    EXPECT_NEAR(noise.scale(), 40.0 / 3, 1e-12);
  }
  noise.update(3 + 40.0 / 8, 8, 3 + 40.0 / 64, 64); // batches may change
  EXPECT_NEAR(noise.scale(), 40.0 / 3, 1e-12);
}

TEST(GradientNoise, SmoothsByAnExponentialMovingAverage) {
  GradientNoise noise(0.75);
  noise.update(3 + 8.0 / 2, 2, 3 + 8.0 / 4, 4);
  noise.update(5 + 16.0 / 2, 2, 5 + 16.0 / 4, 4);
  const double weight = 0.25 * 0.75 + 0.25;
  EXPECT_NEAR(noise.squared_gradient(), (0.25 * 0.75 * 3 + 0.25 * 5) / weight, 1e-12);
  EXPECT_NEAR(noise.noise(), (0.25 * 0.75 * 8 + 0.25 * 16) / weight, 1e-12);
}

// A quadratic loss, the mean over samples x of 1/2 (w - x)' H (w - x), at a w that stays: the gradient of a sample is
// H (w - x), so that with x of mean 0 and variance v in each element G = H w and S = v tr(H^2). Gradients of batches are
// drawn from their exact distribution, elementwise normal with variance v h^2 / b.
TEST(GradientNoise, FindsTheNoiseScaleOfAQuadraticProblem) {
  constexpr int kDimensions = 50;
  constexpr int kRanks = 8;
  constexpr double kSmall = 4;
  constexpr double kBig = kRanks * kSmall;
  constexpr double kVariance = 2;
  std::vector<double> h(kDimensions), w(kDimensions);
  double squared_gradient = 0, trace = 0;
  for (int i = 0; i < kDimensions; ++i) {
    h[i] = 1 + 0.01 * i;
    w[i] = 0.3 + 0.001 * i;
    squared_gradient += std::pow(h[i] * w[i], 2);
    trace += kVariance * h[i] * h[i];
  }
  std::mt19937_64 generator(11);
  std::normal_distribution<double> normal;
  GradientNoise noise(0.99);
  for (int step = 0; step < 1500; ++step) {
    double small = 0, big = 0;
    for (int i = 0; i < kDimensions; ++i) {
      double mean = 0;
      for (int rank = 0; rank < kRanks; ++rank) {
        const double g = h[i] * (w[i] + std::sqrt(kVariance / kSmall) * normal(generator));
        small += g * g / kRanks;
        mean += g / kRanks;
      }
      big += mean * mean;
    }
    noise.update(small, kSmall, big, kBig);
  }
  // B_simple is about 18.5. A moving average with decay d is worth (1 + d) / (1 - d) = 199 updates. One S is, but for a
  // factor, a sample variance with 7 x 50 degrees of freedom: relative deviation sqrt(2 / 350) = 0.076 (a little more,
  // since elements differ), 0.0054 of the average. One |G|^2 has the deviation of |g_big|^2, relative to |G|^2
  // sqrt(4 q / D + 2 q^2 / D) = 0.24 with q = B_simple / 32 and D = 50: 0.017 of the average. Five deviations.
  EXPECT_NEAR(noise.noise() / trace, 1, 0.03);
  EXPECT_NEAR(noise.squared_gradient() / squared_gradient, 1, 0.09);
  EXPECT_NEAR(noise.scale() / (trace / squared_gradient), 1, 0.1);
}

TEST(GradientNoise, SaysWhenThereIsNoNoiseOrNothingElse) {
  GradientNoise noise;
  noise.update(2, 1, 2, 2);
  EXPECT_EQ(noise.scale(), 0);
  GradientNoise drowned;
  drowned.update(2, 1, 1, 2); // as if the gradient were 0: |G_b|^2 = S / b
  EXPECT_EQ(drowned.scale(), kInfinity);
}

TEST(GradientNoise, LeavesOutStepsThatOverflowedAndRefusesOneBatchSize) {
  GradientNoise noise;
  noise.update(4, 1, 3, 2);
  const double before = noise.scale();
  EXPECT_FALSE(noise.update(kInfinity, 1, 3, 2));
  EXPECT_FALSE(noise.update(4, 1, std::nan(""), 2));
  EXPECT_EQ(noise.scale(), before);
  EXPECT_EQ(noise.state().updates, 1);
  EXPECT_THROW(noise.update(4, 2, 3, 2), c10::ValueError);
  EXPECT_THROW(noise.update(4, 0, 3, 2), c10::ValueError);
  EXPECT_THROW(noise.update(-4, 1, 3, 2), c10::ValueError);
  EXPECT_THROW(GradientNoise(1.0), c10::ValueError);
  EXPECT_THROW(noise.load({.squared_gradient = 0, .noise = 1, .updates = 0}), c10::ValueError);
  EXPECT_THROW(noise.load({.squared_gradient = std::nan(""), .noise = 1, .updates = 3}), c10::ValueError);
  EXPECT_EQ(noise.scale(), before);
}

torch::nn::Sequential noisy_model() {
  torch::manual_seed(6);
  torch::nn::Sequential model(torch::nn::Linear(5, 7), torch::nn::Tanh(), torch::nn::Linear(7, 3));
  model->to(at::kDouble);
  return model;
}

at::Tensor noisy_samples(int rank, int micro) {
  return at::arange(20, at::kDouble).view({4, 5}).mul(0.1).add(0.7 * rank - 0.4 * micro).sin();
}

double squared_norm(const torch::nn::Sequential& model) {
  double sum = 0;
  for (const auto& parameter : model->parameters()) {
    sum += parameter.grad().square().sum().item<double>();
  }
  return sum;
}

/// Of the mean loss over these micro-batches of these ranks, without ebb.
double expected_squared_norm(const std::vector<int>& ranks, const std::vector<int>& micros) {
  auto model = noisy_model();
  for (const int rank : ranks) {
    for (const int micro : micros) {
      (model->forward(noisy_samples(rank, micro)).square().mean() / static_cast<double>(ranks.size() * micros.size()))
          .backward();
    }
  }
  return squared_norm(model);
}

struct Layout {
  shard::Strategy strategy;
  int ranks;
  int replicas;
};

class LocalNorm : public ::testing::TestWithParam<Layout> {};

TEST_P(LocalNorm, IsThatOfTheRanksOwnGradient) {
  const auto layout = GetParam();
  std::vector<torch::nn::Sequential> models;
  std::vector<int> ranks;
  std::vector<double> own, one_micro;
  for (int rank = 0; rank < layout.ranks; ++rank) {
    models.push_back(noisy_model());
    ranks.push_back(rank);
    own.push_back(expected_squared_norm({rank}, {0, 1}));
    one_micro.push_back((expected_squared_norm({rank}, {0}) + expected_squared_norm({rank}, {1})) / 2);
  }
  const double reduced = expected_squared_norm(ranks, {0, 1});
  ebb::test::spawn_ranks(layout.ranks, [&](const std::shared_ptr<comm::Communicator>& world) {
    const int rank = world->rank();
    LocalGradientNorm local;
    auto model = fully_shard(
        models[rank], {.mesh = layout.replicas > 1 ? comm::Mesh::replicate_by_shard(
                                                         world, layout.replicas, layout.ranks / layout.replicas)
                                                   : comm::Mesh(world),
                       .strategy = layout.strategy,
                       .wrap = shard::wrap_by_class({"Linear"}),
                       .comm_hook = local.hook()});
    for (const bool no_sync : {true, false}) {
      for (int micro = 0; micro < 2; ++micro) {
        std::optional<shard::NoSync> scope;
        if (no_sync && micro == 0) {
          scope.emplace(model.no_sync());
        }
        (models[rank]->forward(noisy_samples(rank, micro)).square().mean() / 2).backward();
      }
      const double norm = model.clip_grad_norm_(kInfinity);
      EXPECT_NEAR(norm * norm, reduced, 1e-9);
      EXPECT_NEAR(local.take(no_sync ? 1 : 2), no_sync ? own[rank] : one_micro[rank], 1e-9);
      model.zero_grad();
    }
    EXPECT_THROW(local.take(), c10::ValueError); // nothing since
  });
}

INSTANTIATE_TEST_SUITE_P(
    All, LocalNorm,
    ::testing::Values(
        Layout{shard::Strategy::kFullShard, 1, 1}, Layout{shard::Strategy::kFullShard, 2, 1},
        Layout{shard::Strategy::kNoShard, 2, 1}, Layout{shard::Strategy::kHybridShard, 4, 2}),
    [](const auto& info) {
      return std::string(shard::name_of(info.param.strategy)) + "_" + std::to_string(info.param.ranks);
    });

} // namespace
} // namespace ebb::train
