#include "support.h"

#include <sstream>

namespace ebb::shard {
namespace {

using test::error_of;
using test::make_chain;
using test::make_subject;
using test::shard_subject;
using test::wrap_everything;
using ::testing::HasSubstr;

TEST(FullParameters, WritesGoToTheShardsOfAllRanks) {
  ebb::test::spawn_ranks(3, [](const auto& group) {
    auto subject = make_subject("mlp");
    auto model = shard_subject(subject, {.mesh = comm::Mesh(group), .wrap = wrap_everything()});
    {
      const at::NoGradGuard no_grad;
      auto scope = model.full_parameters();
      for (auto& [name, tensor] : subject.parameters()) {
        tensor.fill_(2.5);
        EXPECT_EQ(tensor.template data_ptr<float>()[0], 2.5F);
      }
    }
    EXPECT_EQ(model.residency().held_bytes, 0);
    for (const auto& [name, leaf] : model.named_parameters()) {
      EXPECT_TRUE(at::equal(leaf.detach(), at::full_like(leaf, 2.5).detach())) << name;
    }
    const at::NoGradGuard no_grad;
    EXPECT_EQ(subject.parameters()[0].second.min().template item<float>(), 2.5F);
  });
}

TEST(FullParameters, WithoutWritebackChangesAreDropped) {
  auto chain = make_chain(2);
  auto model = fully_shard(chain, {.mesh = comm::Mesh(comm::single()), .wrap = wrap_by_size(1)});
  const auto before = model.parameters()[0].detach().clone();
  {
    const at::NoGradGuard no_grad;
    auto scope = model.full_parameters({.writeback = false});
    chain->parameters()[0].zero_();
  }
  EXPECT_TRUE(at::equal(model.parameters()[0].detach(), before));
}

TEST(FullParameters, WithoutWritebackAWholeUnitGoesBackToo) {
  auto chain = make_chain(1);
  auto model =
      fully_shard(chain, {.mesh = comm::Mesh(comm::single()), .strategy = Strategy::kNoShard, .wrap = wrap_by_size(1)});
  const auto before = chain->parameters()[0].detach().clone();
  for (const bool writeback : {false, true}) {
    auto scope = model.full_parameters({.writeback = writeback});
    const at::NoGradGuard no_grad;
    chain->parameters()[0].fill_(9);
    scope.close();
    EXPECT_EQ(at::equal(chain->parameters()[0], before), !writeback);
  }
}

TEST(FullParameters, LoadInsideAScopeGoesToTheShardsOfAllRanks) {
  std::stringstream file;
  auto trained = make_chain(2);
  {
    const at::NoGradGuard no_grad;
    trained->parameters()[0].fill_(0.25);
  }
  torch::save(trained, file);
  for (const auto strategy : {Strategy::kFullShard, Strategy::kNoShard}) {
    ebb::test::spawn_ranks(2, [&](const auto& group) {
      auto chain = make_chain(2);
      auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .strategy = strategy, .wrap = wrap_by_size(1)});
      {
        std::stringstream copy(file.str());
        auto scope = model.full_parameters();
        torch::load(chain, copy);
      }
      const auto scope = model.full_parameters({.writeback = false});
      for (std::size_t i = 0; i < 4; ++i) {
        EXPECT_TRUE(at::equal(chain->parameters()[i], trained->parameters()[i])) << i;
      }
    });
  }
}

TEST(FullParameters, Rank0OnlyKeepsOtherRanksSharded) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    auto chain = make_chain(2);
    auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1)});
    EXPECT_THAT(
        error_of([&] { model.full_parameters({.writeback = true, .rank0_only = true}); }),
        HasSubstr("excludes writeback"));
    auto scope = model.full_parameters({.writeback = false, .rank0_only = true});
    if (group->rank() == 0) {
      EXPECT_NE(chain->parameters()[0].template data_ptr<float>(), nullptr);
    } else {
      EXPECT_EQ(model.residency().held_bytes, 0);
    }
  });
}

TEST(FullParameters, AStepInsideAScopeIsRefused) {
  auto chain = make_chain(2);
  auto model = fully_shard(chain, {.mesh = comm::Mesh(comm::single()), .wrap = wrap_by_size(1)});
  torch::optim::SGD optimizer(model.parameters(), 0.1);
  chain->forward(at::ones({2, 8})).sum().backward();
  auto scope = model.full_parameters();
  EXPECT_THAT(error_of([&] { optimizer.step(); }), HasSubstr("after the scope"));
}

TEST(FullParameters, SaveAndLoadRoundTripInsideAScope) {
  auto chain = make_chain(2);
  auto other = make_chain(2);
  auto model = fully_shard(chain, {.mesh = comm::Mesh(comm::single()), .wrap = wrap_by_size(1)});
  std::stringstream stream;
  {
    auto scope = model.full_parameters({.writeback = false});
    torch::save(chain, stream);
  }
  {
    const at::NoGradGuard no_grad;
    other->parameters()[0].zero_();
  }
  torch::load(other, stream);
  EXPECT_TRUE(at::equal(other->parameters()[0].flatten(), model.parameters()[0]));
}

} // namespace
} // namespace ebb::shard
