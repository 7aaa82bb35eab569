#include "support.h"

#include <limits>
#include <map>

namespace ebb::shard {
namespace {

using test::make_chain;
using test::make_subject;
using test::shard_subject;
using test::wrap_everything;

class ClipNorm : public ::testing::TestWithParam<double> {};

TEST_P(ClipNorm, IsTheNormOfTheUnshardedGradientOnEveryRank) {
  const double norm_type = GetParam();
  constexpr int kRanks = 3;
  auto plain = make_subject("mlp");
  for (int rank = 0; rank < kRanks; ++rank) {
    (plain.loss(0, rank) / kRanks).backward();
  }
  std::vector<at::Tensor> parameters;
  for (const auto& [name, tensor] : plain.parameters()) {
    parameters.push_back(tensor);
  }
  const double expected = torch::nn::utils::clip_grad_norm_(parameters, 0.01, norm_type);
  for (const auto strategy : {Strategy::kFullShard, Strategy::kNoShard}) {
    ebb::test::spawn_ranks(kRanks, [&](const auto& group) {
      auto subject = make_subject("mlp");
      auto model = shard_subject(subject, {.mesh = comm::Mesh(group), .strategy = strategy, .wrap = wrap_everything()});
      subject.loss(0, group->rank()).backward();
      EXPECT_NEAR(model.clip_grad_norm_(0.01, norm_type), expected, 1e-6 * expected);
      EXPECT_NEAR(model.clip_grad_norm_(1e9, norm_type), 0.01, 1e-6);
    });
  }
}

// FSDP1's test of clipping without gradients
TEST_P(ClipNorm, WithoutAnyGradientIsZeroAndChangesNothing) {
  for (const int ranks : {1, 2, 4}) {
    for (const auto strategy : test::kStrategies) {
      ebb::test::spawn_ranks(ranks, [&](const auto& group) {
        auto chain = make_chain(2);
        auto model = fully_shard(chain, test::over(group, strategy));
        EXPECT_EQ(model.clip_grad_norm_(1.0, GetParam()), 0);
        for (const auto& leaf : model.parameters()) {
          EXPECT_FALSE(leaf.grad().defined());
        }
      });
    }
    ebb::test::spawn_ranks(ranks, [&](const auto& group) {
      auto chain = make_chain(2);
      auto model = replicate(chain, {.mesh = comm::Mesh(group)});
      EXPECT_EQ(model.clip_grad_norm_(1.0, GetParam()), 0);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(L1L2LInf, ClipNorm, ::testing::Values(1.0, 2.0, std::numeric_limits<double>::infinity()));

TEST(Gradients, AParameterUnusedOnAllRanksKeepsNoGradient) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    auto chain = make_chain(3);
    auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1)});
    auto x = chain->at<torch::nn::LinearImpl>(0).forward(at::ones({2, 8}));
    chain->at<torch::nn::LinearImpl>(2).forward(x).sum().backward();
    for (const auto& [name, leaf] : model.named_parameters()) {
      EXPECT_EQ(leaf.grad().defined(), name[0] != '1') << name;
    }
  });
}

TEST(Gradients, AParameterUsedOnOneRankGetsItsShareOnAllRanks) {
  // Rank 0 runs all three layers; rank 1 goes around the middle one, but looks at it: both must gather the same units.
  const auto loss_of = [](torch::nn::Sequential& layers, int rank) {
    auto x = layers->at<torch::nn::LinearImpl>(0).forward(at::full({2, 8}, 1.0 + rank));
    if (rank == 0) {
      x = layers->at<torch::nn::LinearImpl>(1).forward(x);
    } else {
      layers->at<torch::nn::LinearImpl>(1).weight.detach().sum();
    }
    return layers->at<torch::nn::LinearImpl>(2).forward(x).pow(2).mean();
  };
  auto plain = make_chain(3);
  for (int rank = 0; rank < 2; ++rank) {
    (loss_of(plain, rank) / 2).backward();
  }
  std::map<std::string, at::Tensor> expected;
  for (const auto& parameter : plain->named_parameters()) {
    expected[parameter.key()] = parameter.value().grad().flatten();
  }
  ebb::test::spawn_ranks(2, [&](const auto& group) {
    auto chain = make_chain(3);
    auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1)});
    for (int step = 0; step < 3; ++step) {
      loss_of(chain, group->rank()).backward();
      const auto layout = model.layout();
      const auto leaves = model.named_parameters();
      for (std::size_t i = 0; i < leaves.size(); ++i) {
        const auto& [name, leaf] = leaves[i];
        ASSERT_TRUE(leaf.grad().defined()) << name << " at step " << step;
        const auto begin = layout[i].slices.empty() ? 0 : layout[i].slices[0].begin;
        EXPECT_TRUE(at::allclose(leaf.grad(), expected.at(name).narrow(0, begin, leaf.numel()), 1e-6, 1e-7))
            << name << " at step " << step;
      }
      model.zero_grad();
    }
  });
}

TEST(Gradients, AccumulateOverBackwardsUntilZeroed) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    auto subject = make_subject("mlp");
    auto plain = make_subject("mlp");
    auto model = shard_subject(subject, {.mesh = comm::Mesh(group), .wrap = wrap_everything()});
    for (int step = 0; step < 3; ++step) {
      subject.loss(step, group->rank()).backward();
      for (int rank = 0; rank < 2; ++rank) {
        (plain.loss(step, rank) / 2).backward();
      }
    }
    std::map<std::string, at::Tensor> expected;
    for (const auto& [name, tensor] : plain.parameters()) {
      expected[name] = tensor.grad().flatten();
    }
    const auto layout = model.layout();
    const auto leaves = model.named_parameters();
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      if (!layout[i].slices.empty()) {
        EXPECT_TRUE(at::allclose(
            leaves[i].second.grad(),
            expected[leaves[i].first].narrow(0, layout[i].slices[0].begin, leaves[i].second.numel()), 1e-5, 1e-7))
            << leaves[i].first;
      }
    }
    model.zero_grad();
    EXPECT_FALSE(model.parameters()[0].grad().defined());
  });
}

TEST(Gradients, FrozenParametersAreGatheredButNotReduced) {
  auto chain = make_chain(3);
  for (auto& parameter : chain->at<torch::nn::LinearImpl>(1).parameters()) {
    parameter.set_requires_grad(false);
  }
  auto model = fully_shard(chain, {.mesh = comm::Mesh(comm::single()), .wrap = wrap_by_size(1)});
  chain->forward(at::ones({2, 8})).sum().backward();
  EXPECT_EQ(model.stats().reduces, 2);
  for (const auto& [name, leaf] : model.named_parameters()) {
    EXPECT_EQ(leaf.grad().defined(), name[0] != '1') << name;
  }
}

TEST(Gradients, AutogradGradLeavesParametersAloneAndNothingResident) {
  auto chain = make_chain(3);
  auto plain = make_chain(3);
  auto model = fully_shard(chain, {.mesh = comm::Mesh(comm::single()), .wrap = wrap_by_size(1)});
  const auto grad_of = [](torch::nn::Sequential& layers) {
    const auto x = at::ones({2, 8}).set_requires_grad(true);
    return torch::autograd::grad({layers->forward(x).sum()}, {x})[0];
  };
  EXPECT_TRUE(at::equal(grad_of(chain), grad_of(plain)));
  EXPECT_EQ(model.stats().reduces, 0);
  EXPECT_EQ(model.residency().held_bytes, 0);
  EXPECT_FALSE(model.parameters()[0].grad().defined());
}

} // namespace
} // namespace ebb::shard
