#include "support.h"

#include "engine.h"

namespace ebb::shard {
namespace {

using test::make_chain;
using ::testing::ElementsAre;

// Bytes of one Linear(8, 8) unit at `ranks`: weight 64 and bias 8 elements, each from a multiple of 16, padded to ranks
// equal chunks of a multiple of 16 elements.
std::int64_t unit_bytes(int ranks) {
  const std::int64_t end = 64 + 8;
  const std::int64_t chunk = ((end + ranks - 1) / ranks + 15) / 16 * 16;
  return chunk * ranks * 4;
}

void step(torch::nn::Sequential& chain, torch::optim::Optimizer& optimizer) {
  chain->forward(at::ones({2, 8})).sum().backward();
  optimizer.step();
  optimizer.zero_grad();
}

TEST(Residency, UnshardedBytesNeverExceedTheFrames) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    auto chain = make_chain(6);
    auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1), .frames = 2, .prefetch = 1});
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    for (int i = 0; i < 4; ++i) {
      step(chain, optimizer);
    }
    const auto residency = model.residency();
    EXPECT_EQ(residency.frame_bytes, 3 * unit_bytes(2));
    EXPECT_EQ(residency.peak_held_bytes, 3 * unit_bytes(2));
    EXPECT_EQ(residency.pinned_bytes, 0);
    EXPECT_EQ(residency.kept_bytes, 0);
  });
}

TEST(Residency, BackwardEndsWithEverythingSharded) {
  auto chain = make_chain(4);
  auto model = fully_shard(chain, {.mesh = comm::Mesh(comm::single()), .wrap = wrap_by_size(1)});
  chain->forward(at::ones({2, 8})).sum().backward();
  EXPECT_EQ(model.residency().held_bytes, 0);
}

TEST(Residency, OneFrameWithoutPrefetchIsEnough) {
  auto chain = make_chain(5);
  auto plain = make_chain(5);
  auto model =
      fully_shard(chain, {.mesh = comm::Mesh(comm::single()), .wrap = wrap_by_size(1), .frames = 1, .prefetch = 0});
  const auto x = at::randn({2, 8});
  EXPECT_TRUE(at::equal(chain->forward(x), plain->forward(x)));
  EXPECT_EQ(model.residency().peak_held_bytes, unit_bytes(1));
}

TEST(Residency, AnOperatorOverAllUnitsExceedsTheFramesAndGivesThemBack) {
  auto chain = make_chain(5);
  auto plain = make_chain(5);
  auto model =
      fully_shard(chain, {.mesh = comm::Mesh(comm::single()), .wrap = wrap_by_size(1), .frames = 1, .prefetch = 0});
  const at::NoGradGuard no_grad;
  const auto norms = at::_foreach_norm(chain->parameters());
  const auto expected = at::_foreach_norm(plain->parameters());
  for (std::size_t i = 0; i < norms.size(); ++i) {
    EXPECT_TRUE(at::equal(norms[i], expected[i]));
  }
  const auto residency = model.residency();
  EXPECT_EQ(residency.peak_held_bytes, 5 * unit_bytes(1));
  EXPECT_LE(residency.held_bytes, residency.frame_bytes);
  EXPECT_EQ(residency.pinned_bytes, 0);
}

// Chain of n units, 3 frames (2 + 1 prefetch). Forward gathers n. Backward does not read the first unit, whose input
// needs no gradient, and finds the last 3 still resident: n - 4 more.
TEST(Residency, AStepGathersEachUnitForForwardAndThoseThatLeftForBackward) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    constexpr int kUnits = 6;
    auto chain = make_chain(kUnits);
    auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1)});
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    step(chain, optimizer);
    for (int i = 0; i < 3; ++i) {
      model.reset_stats();
      const auto before = group->traffic();
      step(chain, optimizer);
      const auto& after = group->traffic();
      EXPECT_EQ(model.stats().unshards, 2 * kUnits - 4);
      EXPECT_EQ(model.stats().reduces, kUnits);
      EXPECT_EQ(model.stats().mispredicted, 0);
      EXPECT_EQ(after.calls_of(comm::Op::kAllGather) - before.calls_of(comm::Op::kAllGather), 2 * kUnits - 4);
      EXPECT_EQ(after.calls_of(comm::Op::kReduceScatter) - before.calls_of(comm::Op::kReduceScatter), kUnits);
    }
  });
}

TEST(Residency, ShardGradOpGathersEachUnitOnceAStep) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    auto chain = make_chain(6);
    auto model =
        fully_shard(chain, {.mesh = comm::Mesh(group), .strategy = Strategy::kShardGradOp, .wrap = wrap_by_size(1)});
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    for (int i = 0; i < 3; ++i) {
      model.reset_stats();
      step(chain, optimizer);
      EXPECT_EQ(model.stats().unshards, 6);
      EXPECT_EQ(model.stats().reduces, 6);
      EXPECT_EQ(model.residency().held_bytes, 0);
      EXPECT_EQ(model.residency().peak_held_bytes, 6 * unit_bytes(2));
    }
  });
}

TEST(Residency, NoShardGathersNothingAndReducesEachUnit) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    auto chain = make_chain(6);
    auto model =
        fully_shard(chain, {.mesh = comm::Mesh(group), .strategy = Strategy::kNoShard, .wrap = wrap_by_size(1)});
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    step(chain, optimizer);
    model.reset_stats();
    step(chain, optimizer);
    EXPECT_EQ(model.stats().unshards, 0);
    EXPECT_EQ(model.stats().reduces, 6);
    EXPECT_EQ(model.residency().kept_bytes, 6 * unit_bytes(1));
  });
}

TEST(Prefetch, GathersTheNextUnitOfTheLastForwardAndOfTheReverseInBackward) {
  auto chain = make_chain(5);
  auto model =
      fully_shard(chain, {.mesh = comm::Mesh(comm::single()), .wrap = wrap_by_size(1), .frames = 1, .prefetch = 1});
  torch::optim::SGD optimizer(model.parameters(), 0.1);
  step(chain, optimizer);
  model.engine().record_events(true);
  step(chain, optimizer);
  std::vector<std::string> gathers;
  for (const auto& event : model.engine().take_events()) {
    if (event.rfind("reshard", 0) != 0) {
      gathers.push_back(event);
    }
  }
  EXPECT_THAT(
      gathers,
      ElementsAre(
          "unshard 0", "prefetch 1", "prefetch 2", "prefetch 3", "prefetch 4", // forward: 3 and 4 stay for backward
          "reduce 4", "prefetch 2", "reduce 3", "prefetch 1", "reduce 2", "reduce 1", "reduce 0")); // 0 is not read
}

TEST(Prefetch, AnotherOrderThanLastTimeCostsMemoryButNoWrongValue) {
  auto chain = make_chain(4);
  auto plain = make_chain(4);
  auto model =
      fully_shard(chain, {.mesh = comm::Mesh(comm::single()), .wrap = wrap_by_size(1), .frames = 1, .prefetch = 1});
  const auto run = [](torch::nn::Sequential& layers, const std::vector<int>& order) {
    auto x = at::ones({2, 8});
    for (const int i : order) {
      x = layers->at<torch::nn::LinearImpl>(i).forward(x);
    }
    x.sum().backward();
    return x;
  };
  for (const auto& order : std::vector<std::vector<int>>{{0, 1, 2, 3}, {3, 1, 0, 2}, {2, 2, 0}, {0, 1, 2, 3}}) {
    EXPECT_TRUE(at::equal(run(chain, order), run(plain, order)));
  }
}

TEST(Residency, AnEvaluationBetweenBackwardAndStepIsNotUsedStaleAfterwards) {
  auto chain = make_chain(3);
  auto plain = make_chain(3);
  auto model = fully_shard(chain, {.mesh = comm::Mesh(comm::single()), .wrap = wrap_by_size(1)});
  torch::optim::SGD optimizer(model.parameters(), 0.1);
  torch::optim::SGD plain_optimizer(plain->parameters(), 0.1);
  const auto x = at::ones({2, 8});
  chain->forward(x).sum().backward();
  plain->forward(x).sum().backward();
  for (const bool with_grad : {false, true}) {
    const at::AutoGradMode mode(with_grad);
    EXPECT_TRUE(at::equal(chain->forward(x), plain->forward(x)));
  }
  optimizer.step();
  plain_optimizer.step();
  EXPECT_TRUE(at::equal(chain->forward(x), plain->forward(x)));
}

TEST(Residency, GradientsThatZeroGradDropsAreFreedBeforeTheNextForward) {
  for (const bool by_optimizer : {false, true}) {
    auto chain = make_chain(3);
    auto model = fully_shard(chain, {.mesh = comm::Mesh(comm::single()), .wrap = wrap_by_size(1)});
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    const auto num_held = [&] {
      int held = 0;
      for (const auto& unit : model.engine().units()) {
        held += unit->flats.front()->flat_grad.defined();
      }
      return held;
    };
    chain->forward(at::ones({2, 8})).sum().backward();
    chain->forward(at::ones({2, 8}));
    EXPECT_EQ(num_held(), 3); // the leaves still show them
    if (by_optimizer) {
      optimizer.zero_grad();
    } else {
      model.zero_grad();
    }
    model.reset();
    chain->forward(at::ones({2, 8}));
    EXPECT_EQ(num_held(), 0);
  }
}

} // namespace
} // namespace ebb::shard
