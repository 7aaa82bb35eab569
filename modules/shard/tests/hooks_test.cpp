#include "ebb/shard/join.h"

#include "engine.h"
#include "support.h"

namespace ebb::shard {
namespace {

using test::error_of;
using test::make_chain;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<at::Tensor> gradients(const std::shared_ptr<comm::Communicator>& group, const ShardOptions& options) {
  auto chain = make_chain(3);
  auto model = fully_shard(chain, options);
  chain->forward(at::full({2, 8}, 0.5 + group->rank())).pow(2).mean().backward();
  std::vector<at::Tensor> grads;
  for (const auto& leaf : model.parameters()) {
    grads.push_back(leaf.grad().clone());
  }
  return grads;
}

TEST(CommHook, TheDefaultHookChangesNothing) {
  for (const auto strategy : {Strategy::kFullShard, Strategy::kNoShard}) {
    ebb::test::spawn_ranks(2, [&](const auto& group) {
      auto options = test::over(group);
      options.strategy = strategy;
      const auto plain = gradients(group, options);
      options.comm_hook = reduce_as_is;
      const auto hooked = gradients(group, options);
      for (std::size_t i = 0; i < plain.size(); ++i) {
        EXPECT_TRUE(at::equal(plain[i], hooked[i]));
      }
    });
  }
}

TEST(CommHook, CompressionHalvesTheBytesAndRoundsOnce) {
  for (const auto strategy : {Strategy::kFullShard, Strategy::kNoShard}) {
    ebb::test::spawn_ranks(2, [&](const auto& group) {
      const auto op = strategy == Strategy::kNoShard ? comm::Op::kAllReduce : comm::Op::kReduceScatter;
      const auto sent = [&] { return group->traffic().bytes_sent[static_cast<std::size_t>(op)]; };
      auto options = test::over(group);
      options.strategy = strategy;
      const auto begin = sent();
      const auto plain = gradients(group, options);
      const auto middle = sent();
      for (const auto& hook : {bf16_compress_hook(), fp16_compress_hook()}) {
        options.comm_hook = hook;
        const auto before = sent();
        const auto compressed = gradients(group, options);
        EXPECT_LT(sent() - before, 0.6 * static_cast<double>(middle - begin));
        for (std::size_t i = 0; i < plain.size(); ++i) {
          EXPECT_TRUE(at::allclose(compressed[i], plain[i], 2e-2, 1e-4)) << compressed[i] - plain[i];
          EXPECT_EQ(compressed[i].scalar_type(), at::kFloat);
        }
      }
    });
  }
}

TEST(CommHook, UsersCanWriteTheirOwn) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    const auto plain = gradients(group, test::over(group));
    auto options = test::over(group);
    options.comm_hook = [](const GradientReduction& reduction) {
      reduction.input.mul_(3);
      return reduce_as_is(reduction);
    };
    const auto tripled = gradients(group, options);
    for (std::size_t i = 0; i < plain.size(); ++i) {
      EXPECT_TRUE(at::allclose(tripled[i], 3 * plain[i]));
    }
  });
}

TEST(GradientHook, SeesEachUnitsAveragedShardOnce) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    const auto plain = gradients(group, test::over(group));
    std::vector<std::string> units;
    auto options = test::over(group);
    options.gradient_hook = [&](const std::string& unit, at::Tensor& gradient) {
      units.push_back(unit);
      gradient.mul_(2);
    };
    const auto doubled = gradients(group, options);
    EXPECT_THAT(units, ElementsAre("2", "1", "0"));
    for (std::size_t i = 0; i < plain.size(); ++i) {
      EXPECT_TRUE(at::equal(doubled[i], 2 * plain[i]));
    }
  });
}

TEST(OptimizerInBackward, EqualsSteppingAfterwardsAndKeepsNoGradient) {
  for (const auto strategy : {Strategy::kFullShard, Strategy::kShardGradOp, Strategy::kNoShard}) {
    ebb::test::spawn_ranks(2, [&](const auto& group) {
      auto options = test::over(group);
      options.strategy = strategy;
      auto plain_chain = make_chain(4);
      auto plain = fully_shard(plain_chain, options);
      auto chain = make_chain(4);
      auto model = fully_shard(chain, options);
      torch::optim::AdamW optimizer(plain.parameters(), 0.01);
      std::map<std::string, std::unique_ptr<torch::optim::AdamW>> optimizers;
      for (const auto& [name, leaf] : model.named_parameters()) {
        optimizers[name] = std::make_unique<torch::optim::AdamW>(std::vector<at::Tensor>{leaf}, 0.01);
      }
      model.set_optimizer_in_backward([&](const std::string& name, at::Tensor& leaf) {
        optimizers.at(name)->step();
        leaf.mutable_grad() = at::Tensor();
      });
      for (int step = 0; step < 3; ++step) {
        const auto x = at::full({2, 8}, 0.2 + group->rank() + step);
        plain_chain->forward(x).pow(2).mean().backward();
        optimizer.step();
        optimizer.zero_grad();
        chain->forward(x).pow(2).mean().backward();
        for (std::size_t i = 0; i < model.parameters().size(); ++i) {
          EXPECT_FALSE(model.parameters()[i].grad().defined());
          EXPECT_TRUE(at::equal(model.parameters()[i], plain.parameters()[i])) << i << " at step " << step;
        }
      }
    });
  }
}

TEST(Ignored, ModulesAndParametersStayPlainAndUnreduced) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    auto chain = make_chain(4);
    auto options = test::over(group);
    options.ignored = [](const ModuleInfo& info) { return info.name == "1"; };
    options.ignored_parameters = {"3.bias"};
    auto model = fully_shard(chain, options);
    std::vector<std::string> ignored;
    for (const auto& [name, tensor] : model.ignored_parameters()) {
      ignored.push_back(name);
    }
    EXPECT_THAT(ignored, ElementsAre("1.weight", "1.bias", "3.bias"));
    EXPECT_EQ(model.parameters().size(), 5U);
    chain->forward(at::full({2, 8}, 1.0 + group->rank())).pow(2).mean().backward();
    auto plain = make_chain(4);
    plain->forward(at::full({2, 8}, 1.0 + group->rank())).pow(2).mean().backward();
    EXPECT_TRUE(at::equal(chain->parameters()[2].grad(), plain->parameters()[2].grad())); // this rank's own
    EXPECT_NE(chain->parameters()[2].data_ptr(), nullptr);
    auto other = make_chain(2);
    auto wrong = test::over(group);
    wrong.ignored_parameters = {"1.weigth"};
    EXPECT_THAT(error_of([&] { (void)fully_shard(other, wrong); }), HasSubstr("got '1.weigth'"));
  });
}

TEST(Join, RanksWithFewerBatchesTakePartUntilTheLast) {
  ebb::test::spawn_ranks(3, [](const auto& group) {
    auto chain = make_chain(3);
    auto model = fully_shard(chain, test::over(group));
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    auto plain = make_chain(3);
    torch::optim::SGD reference(plain->parameters(), 0.1);
    const auto batch_of = [](int rank, int step) { return at::full({2, 8}, 0.1 * (1 + rank) + 0.05 * step); };
    const auto num_batches = [](int rank) { return 2 + 2 * rank; };
    Join join(group);
    at::Tensor batch;
    int step = 0;
    while (join.step(step < num_batches(group->rank()))) {
      if (join.active()) {
        batch = batch_of(group->rank(), step);
      }
      join.weighted(chain->forward(batch).pow(2).mean()).backward();
      optimizer.step();
      optimizer.zero_grad();

      reference.zero_grad();
      for (int rank = 0; rank < 3; ++rank) {
        if (step < num_batches(rank)) {
          (plain->forward(batch_of(rank, step)).pow(2).mean() / 3).backward();
        }
      }
      reference.step();
      ++step;
    }
    EXPECT_EQ(step, 6);
    const auto scope = model.full_parameters({.writeback = false});
    for (std::size_t i = 0; i < plain->parameters().size(); ++i) {
      EXPECT_TRUE(at::allclose(chain->parameters()[i], plain->parameters()[i], 1e-5, 1e-7)) << i;
    }
  });
}

TEST(Join, CanAverageOverTheRanksThatStillHaveBatches) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    Join join(group, /*divide_by_active=*/true);
    ASSERT_TRUE(join.step(true));
    EXPECT_EQ(join.weighted(at::ones({})).template item<float>(), 1);
    ASSERT_TRUE(join.step(group->rank() == 0));
    EXPECT_EQ(join.num_active(), 1);
    EXPECT_EQ(join.weighted(at::ones({})).template item<float>(), group->rank() == 0 ? 2 : 0);
    EXPECT_FALSE(join.step(false));
  });
}

TEST(Join, ARankWithoutAnyBatchIsNamed) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    Join join(group);
    if (group->rank() == 1) {
      EXPECT_THAT(error_of([&] { join.step(false); }), HasSubstr("rank 1 has no batch at the first step"));
    } else {
      EXPECT_TRUE(join.step(true));
    }
  });
}

} // namespace
} // namespace ebb::shard
