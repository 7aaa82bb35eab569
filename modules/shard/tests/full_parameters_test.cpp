#include "support.h"

#include "support/forwarding_communicator.h"

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

// A group whose all-gathers end with number `last`.
class GathersEnd final : public ebb::test::ForwardingCommunicator {
 public:
  GathersEnd(std::shared_ptr<comm::Communicator> group, std::shared_ptr<int> left)
      : ForwardingCommunicator(std::move(group)), left_(std::move(left)) {}
  std::unique_ptr<comm::Work> all_gather(
      const at::Tensor& output, const at::Tensor& input, std::string_view unit) override {
    TORCH_CHECK((*left_)-- > 0, "no more gathers");
    return ForwardingCommunicator::all_gather(output, input, unit);
  }

 private:
  std::shared_ptr<int> left_;
};

TEST(FullParameters, AScopeThatCannotOpenIsUndone) {
  for (const bool on_cpu : {false, true}) {
    const auto left = std::make_shared<int>(1000);
    const auto group = std::make_shared<GathersEnd>(comm::single(), left);
    auto chain = make_chain(4);
    auto plain = make_chain(4);
    auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .wrap = wrap_everything()});
    const auto x = at::ones({1, 8});
    const auto step = [&](torch::nn::Sequential& net) { net->forward(x).sum().backward(); };
    step(chain);
    step(plain);
    *left = 2; // two of four units
    EXPECT_THAT(
        error_of([&] { (void)model.full_parameters({.offload_to_cpu = on_cpu, .with_grads = true}); }),
        HasSubstr("no more gathers"));
    *left = 1000;
    EXPECT_EQ(model.residency().held_bytes, 0) << on_cpu;
    torch::optim::SGD(model.parameters(), 0.1).step();
    torch::optim::SGD(plain->parameters(), 0.1).step();
    EXPECT_TRUE(at::equal(chain->forward(x), plain->forward(x))) << on_cpu; // and not the values of the scope
    auto scope = model.full_parameters();
    scope.close();
  }
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

TEST(PartOfTheModel, IsWholeAndTheRestWorksAsBefore) {
  for (const int ranks : {1, 2, 4}) {
    ebb::test::spawn_ranks(ranks, [](const auto& group) {
      auto chain = make_chain(4);
      auto plain = make_chain(4);
      auto model = fully_shard(chain, test::over(group));
      const auto gathers = model.stats().unshards;
      auto scope = model.full_parameters({.modules = {"1", "2"}});
      EXPECT_EQ(model.stats().unshards - gathers, 2);
      const at::NoGradGuard no_grad;
      EXPECT_EQ(chain->parameters()[2].data_ptr<float>()[0], plain->parameters()[2].data_ptr<float>()[0]);
      EXPECT_THAT(error_of([&] { chain->parameters()[0].data_ptr(); }), HasSubstr("raw access"));
      EXPECT_THAT(error_of([&] { chain->parameters()[0].zero_(); }), HasSubstr("scope of its unit"));
      chain->parameters()[2].mul_(2);
      plain->parameters()[2].mul_(2);
      EXPECT_TRUE(at::equal(chain->forward(at::ones({2, 8})), plain->forward(at::ones({2, 8}))));
      scope.close();
      EXPECT_THAT(error_of([&] { chain->parameters()[4].zero_(); }), HasSubstr("scope of its unit"));
      EXPECT_TRUE(at::equal(chain->forward(at::ones({2, 8})), plain->forward(at::ones({2, 8}))));
    });
  }
}

TEST(PartOfTheModel, IsNamedByModulesAboveUnitsOrByUnits) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    auto subject = make_subject("gpt");
    auto model = shard_subject(subject, {.mesh = comm::Mesh(group), .wrap = wrap_by_class({"Block"})});
    const auto opened = [&](const FullParametersOptions& options) {
      const auto before = model.stats().unshards;
      const auto scope = model.full_parameters(options);
      return model.stats().unshards - before;
    };
    EXPECT_EQ(opened({.modules = {"blocks"}}), 3);
    EXPECT_EQ(opened({.modules = {"blocks.1"}}), 1);
    EXPECT_EQ(opened({.modules = {"blocks.1.qkv", "tokens"}}), 2); // the units that these belong to
    EXPECT_EQ(opened({.modules = {"(root)"}, .recurse = false}), 1);
    EXPECT_EQ(opened({.modules = {""}}), 4);
    EXPECT_EQ(opened({}), 4);
    EXPECT_THAT(error_of([&] { opened({.modules = {"block"}}); }), HasSubstr("got 'block'"));
    EXPECT_THAT(error_of([&] { opened({.modules = {"blocks"}, .recurse = false}); }), HasSubstr("'blocks.0'"));
  });
}

TEST(FullOnCpu, ReadsAndWritesEveryStrategyAndPrecision) {
  for (const auto strategy : test::kStrategies) {
    for (const char* preset : {"fp32", "bf16"}) {
      ebb::test::spawn_ranks(2, [&](const auto& group) {
        auto chain = make_chain(2);
        auto plain = make_chain(2);
        auto options = test::over(group, strategy);
        options.mixed_precision = mixed_precision(preset);
        auto model = fully_shard(chain, options);
        const at::NoGradGuard no_grad;
        for (const bool writeback : {false, true, true}) {
          const auto scope = model.full_parameters({.writeback = writeback, .offload_to_cpu = true});
          for (std::size_t i = 0; i < 4; ++i) {
            EXPECT_TRUE(chain->parameters()[i].is_cpu());
            EXPECT_TRUE(at::equal(chain->parameters()[i], plain->parameters()[i])) << i;
            chain->parameters()[i].add_(1e-6);
            if (writeback) {
              plain->parameters()[i].add_(1e-6);
            }
          }
        }
        chain->forward(at::ones({2, 8})).sum();
        auto rank0 = model.full_parameters({.writeback = false, .rank0_only = true, .offload_to_cpu = true});
        EXPECT_TRUE(group->rank() != 0 || at::equal(chain->parameters()[0], plain->parameters()[0]));
      });
    }
  }
}

TEST(FullGradients, AreThoseOfOneUnshardedProcessAndCanBeWritten) {
  for (const auto strategy : {Strategy::kFullShard, Strategy::kNoShard}) {
    for (const int ranks : {1, 2, 4}) {
      ebb::test::spawn_ranks(ranks, [&](const auto& group) {
        auto plain = make_chain(2);
        std::vector<at::Tensor> sums(4);
        for (int rank = 0; rank < ranks; ++rank) {
          plain->forward(at::full({2, 8}, 0.5 + rank)).pow(2).mean().backward();
          for (std::size_t i = 0; i < 4; ++i) {
            const auto grad = std::exchange(plain->parameters()[i].mutable_grad(), at::Tensor());
            sums[i] = sums[i].defined() ? sums[i] + grad : grad;
          }
        }
        auto chain = make_chain(2);
        auto model = fully_shard(chain, test::over(group, strategy));
        chain->forward(at::full({2, 8}, 0.5 + group->rank())).pow(2).mean().backward();
        const auto own = model.parameters()[0].grad().clone();
        {
          const auto scope = model.full_parameters({.writeback = false, .with_grads = true});
          for (std::size_t i = 0; i < 4; ++i) {
            EXPECT_TRUE(at::equal(chain->parameters()[i].grad(), sums[i] / ranks)) << i;
          }
          chain->parameters()[0].mutable_grad().zero_(); // without writeback: dropped
        }
        EXPECT_TRUE(at::equal(model.parameters()[0].grad(), own));
        EXPECT_THAT(error_of([&] { chain->parameters()[0].grad().sum(); }), HasSubstr("is in the shards"));
        {
          const auto scope = model.full_parameters({.with_grads = true});
          chain->parameters()[0].mutable_grad().mul_(2);
          chain->parameters()[1].mutable_grad() = at::Tensor();
        }
        EXPECT_TRUE(at::equal(model.parameters()[0].grad(), 2 * own));
        EXPECT_FALSE(model.parameters()[1].grad().defined());
        chain->forward(at::full({2, 8}, 0.5 + group->rank())).pow(2).mean().backward();
        EXPECT_TRUE(at::equal(model.parameters()[0].grad(), 2 * own + own));
      });
    }
  }
}

TEST(FullGradients, HaveTheStridesOfTheirParameters) {
  struct NetImpl : torch::nn::Module {
    NetImpl() : weight(register_parameter("weight", at::linspace(-1, 1, 15).view({5, 3}).t().clone())) {}
    at::Tensor weight;
  };
  ebb::test::spawn_ranks(2, [](const auto& group) {
    NetImpl net;
    auto model = fully_shard(net, {.mesh = comm::Mesh(group), .wrap = wrap_root()});
    ASSERT_FALSE(net.weight.is_contiguous());
    const auto factor = at::arange(15, at::kFloat).view({3, 5});
    (net.weight * factor).sum().backward();
    const auto sum = [&] {
      auto total = model.named_parameters().back().second.grad().sum();
      group->all_reduce(total, comm::ReduceOp::kSum, 1, "")->wait();
      return total.template item<float>();
    };
    EXPECT_EQ(sum(), 105); // 0 + 1 + ... + 14
    auto scope = model.full_parameters({.with_grads = true});
    EXPECT_TRUE(at::equal(net.weight.grad(), factor));
    EXPECT_EQ(net.weight.grad().strides(), net.weight.strides());
    net.weight.mutable_grad() = factor.mul(2).contiguous();
    scope.close();
    EXPECT_EQ(sum(), 210);
    const auto again = model.full_parameters({.writeback = false, .with_grads = true});
    EXPECT_TRUE(at::equal(net.weight.grad(), 2 * factor));
  });
}

TEST(FullGradients, OfRanksThatDifferAreNamed) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    auto chain = make_chain(2);
    auto model = fully_shard(chain, test::over(group));
    chain->forward(at::ones({2, 8})).sum().backward();
    if (group->rank() == 1) {
      model.parameters()[3].mutable_grad() = at::Tensor();
    }
    EXPECT_THAT(
        error_of([&] { model.full_parameters({.with_grads = true}); }),
        ::testing::AllOf(HasSubstr("'1.bias' has a gradient on rank 0"), HasSubstr("none on rank 1")));
  });
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
