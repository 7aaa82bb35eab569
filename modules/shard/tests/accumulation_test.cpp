#include "support.h"

#include "engine.h"

#include <map>
#include <optional>

namespace ebb::shard {
namespace {

using test::make_subject;
using test::shard_subject;
using test::wrap_everything;

constexpr int kMicroSteps = 3;

// Gradients of one unsharded process: each rank's micro-batches summed first, then the ranks in order, divided once.
std::vector<at::Tensor> expected_gradients(const std::string& kind, int ranks) {
  auto subject = make_subject(kind);
  std::vector<at::Tensor> sums;
  const auto add = [&] {
    std::size_t i = 0;
    for (const auto& [name, tensor] : subject.parameters()) {
      auto& grad = tensor.mutable_grad();
      if (sums.size() <= i) {
        sums.push_back(grad);
      } else {
        sums[i] = sums[i] + grad;
      }
      grad = at::Tensor();
      ++i;
    }
  };
  for (int rank = 0; rank < ranks; ++rank) {
    for (int micro = 0; micro < kMicroSteps; ++micro) {
      subject.loss(micro, rank).backward();
    }
    add();
  }
  for (auto& sum : sums) {
    sum = sum / ranks;
  }
  return sums;
}

void expect_gradients(
    ShardedModel& model, test::Subject& subject, const std::vector<at::Tensor>& expected, double tolerance) {
  std::map<std::string, at::Tensor> by_name;
  std::size_t i = 0;
  for (const auto& [name, tensor] : subject.parameters()) {
    by_name[name] = expected[i++].flatten();
  }
  const auto layout = model.layout();
  const auto leaves = model.named_parameters();
  for (std::size_t k = 0; k < leaves.size(); ++k) {
    const auto begin = layout[k].slices.empty() ? 0 : layout[k].slices[0].begin;
    const auto part = by_name.at(leaves[k].first).narrow(0, begin, leaves[k].second.numel());
    ASSERT_TRUE(leaves[k].second.grad().defined()) << leaves[k].first;
    if (tolerance == 0) {
      EXPECT_TRUE(at::equal(leaves[k].second.grad(), part)) << leaves[k].first;
    } else {
      EXPECT_TRUE(at::allclose(leaves[k].second.grad(), part, tolerance, tolerance)) << leaves[k].first;
    }
  }
}

class NoSyncEquality : public ::testing::TestWithParam<std::tuple<Strategy, int, std::string>> {};

TEST_P(NoSyncEquality, AccumulatesAsOneUnshardedProcessAndReducesOnce) {
  const auto& [strategy, ranks, kind] = GetParam();
  const auto expected = expected_gradients(kind, ranks);
  ebb::test::spawn_ranks(ranks, [&, strategy = strategy, kind = kind](const auto& group) {
    auto subject = make_subject(kind);
    auto model = shard_subject(subject, {.mesh = comm::Mesh(group), .strategy = strategy, .wrap = wrap_everything()});
    for (int repeat = 0; repeat < 2; ++repeat) { // the second time with what the first has left behind
      const auto before = model.stats().reduces;
      for (int micro = 0; micro < kMicroSteps; ++micro) {
        std::optional<NoSync> scope;
        if (micro + 1 < kMicroSteps) {
          scope.emplace(model.no_sync());
        }
        subject.loss(micro, group->rank()).backward();
      }
      EXPECT_EQ(model.stats().reduces - before, static_cast<std::int64_t>(model.units().size()));
      expect_gradients(model, subject, expected, 0);
      model.zero_grad();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    All, NoSyncEquality,
    ::testing::Combine(
        ::testing::Values(Strategy::kFullShard, Strategy::kShardGradOp, Strategy::kNoShard), ::testing::Values(1, 2, 4),
        ::testing::Values("gpt", "mlp")),
    [](const auto& info) {
      return std::string(name_of(std::get<0>(info.param))) + "_" + std::to_string(std::get<1>(info.param)) + "ranks_" +
             std::get<2>(info.param);
    });

TEST(NoSync, CommunicatesNothingButGathers) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    auto subject = make_subject("gpt");
    auto model = shard_subject(subject, {.mesh = comm::Mesh(group), .wrap = wrap_everything()});
    const auto scope = model.no_sync();
    subject.loss(0, group->rank()).backward();
    EXPECT_EQ(group->traffic().calls_of(comm::Op::kReduceScatter), 0);
    EXPECT_EQ(group->traffic().calls_of(comm::Op::kAllReduce), 0);
    EXPECT_EQ(model.residency().held_bytes, 0); // parameters are freed all the same
    for (const auto& leaf : model.parameters()) {
      EXPECT_FALSE(leaf.grad().defined());
    }
  });
}

TEST(NoSync, AddsToGradientsThatEarlierBackwardsReduced) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    const auto expected = expected_gradients("mlp", 2);
    auto subject = make_subject("mlp");
    auto model = shard_subject(subject, {.mesh = comm::Mesh(group), .wrap = wrap_everything()});
    subject.loss(0, group->rank()).backward();
    {
      const auto scope = model.no_sync();
      subject.loss(1, group->rank()).backward();
    }
    subject.loss(2, group->rank()).backward();
    expect_gradients(model, subject, expected, 1e-6);
  });
}

TEST(NoSync, AParameterThatTheLastMicroBatchDoesNotUseIsReducedAllTheSame) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    const auto loss_of = [](torch::nn::Sequential& layers, int rank, bool all) {
      auto x = layers->at<torch::nn::LinearImpl>(0).forward(at::full({2, 8}, 1.0 + rank));
      return (all ? layers->at<torch::nn::LinearImpl>(1).forward(x) : x).pow(2).mean();
    };
    auto plain = test::make_chain(2);
    for (int rank = 0; rank < 2; ++rank) {
      ((loss_of(plain, rank, true) + loss_of(plain, rank, false)) / 2).backward();
    }
    auto chain = test::make_chain(2);
    auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1)});
    {
      const auto scope = model.no_sync();
      loss_of(chain, group->rank(), true).backward();
    }
    loss_of(chain, group->rank(), false).backward();
    const auto layout = model.layout();
    for (std::size_t i = 0; i < 4; ++i) {
      const auto& grad = model.parameters()[i].grad();
      ASSERT_TRUE(grad.defined()) << layout[i].name;
      const auto begin = layout[i].slices.empty() ? 0 : layout[i].slices[0].begin;
      const auto expected = plain->parameters()[i].grad().flatten().narrow(0, begin, grad.numel());
      EXPECT_TRUE(at::allclose(grad, expected, 1e-5, 1e-7)) << layout[i].name;
    }
  });
}

TEST(NoSync, WhatZeroGradDropsDoesNotComeBack) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    const auto expected = expected_gradients("mlp", 2);
    auto subject = make_subject("mlp");
    auto model = shard_subject(subject, {.mesh = comm::Mesh(group), .wrap = wrap_everything()});
    {
      const auto scope = model.no_sync();
      subject.loss(7, group->rank()).backward(); // of a window that is given up
    }
    model.zero_grad();
    for (int micro = 0; micro < kMicroSteps; ++micro) {
      subject.loss(micro, group->rank()).backward();
    }
    expect_gradients(model, subject, expected, 1e-6);
  });
}

TEST(GradientSync, CanBeOffForSomeUnits) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    const auto expected = expected_gradients("mlp", 2);
    auto subject = make_subject("mlp");
    auto model = shard_subject(subject, {.mesh = comm::Mesh(group), .wrap = wrap_everything()});
    model.set_requires_gradient_sync({"b"}, false);
    subject.loss(0, group->rank()).backward();
    subject.loss(1, group->rank()).backward();
    for (const auto& [name, leaf] : model.named_parameters()) {
      EXPECT_EQ(leaf.grad().defined(), name.rfind("b.", 0) != 0) << name;
    }
    model.set_requires_gradient_sync(true);
    subject.loss(2, group->rank()).backward();
    expect_gradients(model, subject, expected, 1e-6);
  });
}

TEST(GradientDivideFactor, ReplacesTheNumberOfRanks) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    auto plain = make_subject("mlp");
    auto model = shard_subject(plain, {.mesh = comm::Mesh(group), .wrap = wrap_everything()});
    plain.loss(0, group->rank()).backward();
    auto other = make_subject("mlp");
    auto summed =
        shard_subject(other, {.mesh = comm::Mesh(group), .wrap = wrap_everything(), .gradient_divide_factor = 1.0});
    other.loss(0, group->rank()).backward();
    for (std::size_t i = 0; i < model.parameters().size(); ++i) {
      EXPECT_TRUE(at::equal(summed.parameters()[i].grad(), 2 * model.parameters()[i].grad()));
    }
  });
}

} // namespace
} // namespace ebb::shard
