#include "ebb/shard/sharded_grad_scaler.h"

#include "support.h"

namespace ebb::shard {
namespace {

using test::error_of;
using test::make_chain;
using ::testing::HasSubstr;

TEST(ShardedGradScaler, ScaledStepsEqualUnscaledOnes) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    auto chain = make_chain(3);
    auto plain = make_chain(3);
    auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1)});
    auto unscaled = fully_shard(plain, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1)});
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    torch::optim::SGD other(unscaled.parameters(), 0.1);
    ShardedGradScaler scaler(group, {.init_scale = 1024.0});
    for (int step = 0; step < 3; ++step) {
      const auto x = at::full({2, 8}, 0.1 * (1 + group->rank()));
      scaler.scale(chain->forward(x).pow(2).mean()).backward();
      EXPECT_TRUE(scaler.step(optimizer));
      scaler.update();
      optimizer.zero_grad();
      plain->forward(x).pow(2).mean().backward();
      other.step();
      other.zero_grad();
    }
    for (std::size_t i = 0; i < model.parameters().size(); ++i) {
      EXPECT_TRUE(at::equal(model.parameters()[i], unscaled.parameters()[i])); // powers of two scale exactly
    }
  });
}

TEST(ShardedGradScaler, AnOverflowInOneShardStopsEveryRanksStep) {
  ebb::test::spawn_ranks(3, [](const auto& group) {
    auto chain = make_chain(3);
    auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1)});
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    ShardedGradScaler scaler(group, {.init_scale = 8.0, .growth_interval = 2});
    chain->forward(at::ones({2, 8})).sum().backward();
    if (group->rank() == 1) { // this rank's shard alone
      for (const auto& leaf : model.parameters()) {
        if (leaf.numel() > 0) {
          leaf.mutable_grad().fill_(std::numeric_limits<float>::infinity());
          break;
        }
      }
    }
    std::vector<at::Tensor> before;
    for (const auto& leaf : model.parameters()) {
      before.push_back(leaf.detach().clone());
    }
    EXPECT_FALSE(scaler.step(optimizer));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 4.0);
    for (std::size_t i = 0; i < before.size(); ++i) {
      EXPECT_TRUE(at::equal(model.parameters()[i], before[i]));
    }
    model.zero_grad();
    for (int step = 0; step < 2; ++step) {
      scaler.scale(chain->forward(at::ones({2, 8})).sum()).backward();
      EXPECT_TRUE(scaler.step(optimizer));
      scaler.update();
      model.zero_grad();
    }
    EXPECT_EQ(scaler.get_scale(), 8.0); // grown after two good steps
  });
}

TEST(ShardedGradScaler, UnscalesOnceForClipping) {
  auto chain = make_chain(1);
  auto model = fully_shard(chain, {.mesh = comm::Mesh(comm::single()), .wrap = wrap_root()});
  torch::optim::SGD optimizer(model.parameters(), 0.1);
  ShardedGradScaler scaler(comm::single(), {.init_scale = 256.0});
  const auto loss = chain->forward(at::ones({1, 8})).sum();
  scaler.scale(loss).backward();
  scaler.unscale_(optimizer);
  auto plain = make_chain(1);
  plain->forward(at::ones({1, 8})).sum().backward();
  EXPECT_TRUE(at::equal(model.parameters()[0].grad(), plain->parameters()[0].grad().flatten()));
  EXPECT_THAT(error_of([&] { scaler.unscale_(optimizer); }), HasSubstr("unscaled or stepped already"));
  scaler.step(optimizer);
  EXPECT_THAT(error_of([&] { scaler.step(optimizer); }), HasSubstr("call update() after each step"));
}

TEST(ShardedGradScaler, StateIsSavedAndLoaded) {
  ShardedGradScaler scaler(comm::single(), {.init_scale = 2.0});
  scaler.load_state({64.0, 7});
  EXPECT_EQ(scaler.get_scale(), 64.0);
  EXPECT_EQ(scaler.state().growth_tracker, 7);
  scaler.update(32.0);
  EXPECT_EQ(scaler.get_scale(), 32.0);
  EXPECT_THAT(error_of([&] { scaler.load_state({-1.0, 0}); }), HasSubstr("got -1"));
  EXPECT_THAT(error_of([&] { scaler.update(); }), HasSubstr("no optimizer"));
}

TEST(ShardedGradScaler, DisabledPassesEverythingThrough) {
  auto chain = make_chain(1);
  auto model = fully_shard(chain, {.mesh = comm::Mesh(comm::single()), .wrap = wrap_root()});
  torch::optim::SGD optimizer(model.parameters(), 0.1);
  ShardedGradScaler scaler(comm::single(), {.enabled = false});
  const auto loss = chain->forward(at::ones({1, 8})).sum();
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  loss.backward();
  EXPECT_TRUE(scaler.step(optimizer));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 1.0);
}

TEST(ShardedGradScaler, BadOptionsNameTheValue) {
  EXPECT_THAT(error_of([] { ShardedGradScaler(comm::single(), {.init_scale = 0}); }), HasSubstr("got 0"));
  EXPECT_THAT(error_of([] { ShardedGradScaler(comm::single(), {.growth_factor = 1}); }), HasSubstr("got 1"));
  EXPECT_THAT(error_of([] { ShardedGradScaler(comm::single(), {.backoff_factor = 1}); }), HasSubstr("got 1"));
  EXPECT_THAT(error_of([] { ShardedGradScaler(comm::single(), {.growth_interval = 0}); }), HasSubstr("got 0"));
  EXPECT_THAT(error_of([] { ShardedGradScaler(nullptr); }), HasSubstr("mesh.world()"));
}

} // namespace
} // namespace ebb::shard
