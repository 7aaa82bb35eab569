#include "support.h"

#include "ebb/shard/optim.h"

#include <limits>
#include <map>

namespace ebb::shard {
namespace {

using test::error_of;
using test::make_chain;
using test::make_subject;
using test::shard_subject;
using test::wrap_everything;
using ::testing::HasSubstr;

TEST(ShardedModel, LeavesAreTheSlicesOfTheOriginalParameters) {
  for (const int ranks : {1, 2, 3, 4}) {
    std::mutex mutex;
    std::map<std::string, std::int64_t> total;
    ebb::test::spawn_ranks(ranks, [&](const auto& group) {
      auto plain = make_subject("mlp");
      std::map<std::string, at::Tensor> whole;
      for (const auto& [name, tensor] : plain.parameters()) {
        whole[name] = tensor.detach().flatten();
      }
      auto subject = make_subject("mlp");
      auto model = shard_subject(subject, {.mesh = comm::Mesh(group), .wrap = wrap_everything()});
      const auto layout = model.layout();
      const auto leaves = model.named_parameters();
      const std::lock_guard lock(mutex);
      ASSERT_EQ(leaves.size(), whole.size());
      for (std::size_t i = 0; i < leaves.size(); ++i) {
        const auto& [name, leaf] = leaves[i];
        EXPECT_TRUE(leaf.is_leaf() && leaf.requires_grad());
        EXPECT_EQ(leaf.dim(), 1);
        total[name] += leaf.numel();
        if (layout[i].slices.empty()) {
          EXPECT_EQ(leaf.numel(), 0);
        } else {
          EXPECT_TRUE(at::equal(leaf.detach(), whole.at(name).narrow(0, layout[i].slices[0].begin, leaf.numel())))
              << name;
        }
      }
    });
    EXPECT_EQ(total["a.weight"], 91);
    EXPECT_EQ(total["temperature"], 1);
  }
}

TEST(ShardedModel, TiedParametersAppearOnceAndStayTied) {
  struct Tied : torch::nn::Module {
    Tied() : a(register_module("a", torch::nn::Linear(4, 4))) {
      b = register_module("b", torch::nn::Linear(4, 4));
      b->register_parameter("weight_again", a->weight);
    }
    torch::nn::Linear a{nullptr}, b{nullptr};
  };
  auto tied = std::make_shared<Tied>();
  auto model = fully_shard(*tied, {.mesh = comm::Mesh(comm::single()), .wrap = wrap_by_size(1)});
  std::vector<std::string> names;
  for (const auto& [name, leaf] : model.named_parameters()) {
    names.push_back(name);
  }
  EXPECT_THAT(names, ::testing::UnorderedElementsAre("a.weight", "a.bias", "b.weight", "b.bias"));
  EXPECT_TRUE(tied->a->weight.is_same(tied->b->named_parameters()["weight_again"]));
}

TEST(ShardedModel, EveryRankStartsFromRank0OrFromTheSeed) {
  for (const bool sync : {true, false}) {
    std::mutex mutex;
    std::vector<at::Tensor> values(2);
    ebb::test::spawn_ranks(2, [&](const auto& group) {
      std::unique_lock lock(mutex);
      torch::manual_seed(sync ? 10 + group->rank() : 10);
      torch::nn::BatchNorm1d norm(3);
      torch::nn::Sequential net(torch::nn::Linear(3, 3), norm);
      if (sync && group->rank() == 1) {
        norm->running_mean.fill_(5);
      }
      lock.unlock();
      auto model = fully_shard(net, {.mesh = comm::Mesh(group), .sync_module_states = sync});
      auto scope = model.full_parameters({.writeback = false});
      values[group->rank()] = at::cat({net->parameters()[0].detach().flatten(), net->buffers()[0]});
    });
    EXPECT_TRUE(at::equal(values[0], values[1]));
  }
}

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

TEST(ShardedModel, LeavesOutliveIt) {
  auto chain = make_chain(2);
  std::vector<at::Tensor> leaves;
  at::Tensor expected;
  {
    auto model = fully_shard(chain, {.mesh = comm::Mesh(comm::single()), .wrap = wrap_by_size(1)});
    leaves = model.parameters();
    expected = leaves[0].detach().clone();
  }
  EXPECT_TRUE(at::equal(leaves[0].detach(), expected));
}

TEST(ShardedModel, MayGoWhileAPrefetchIsUnderWay) {
  ebb::test::spawn_ranks(3, [](const auto& group) {
    auto chain = make_chain(4);
    auto model =
        std::make_unique<ShardedModel>(fully_shard(chain, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1)}));
    const at::NoGradGuard no_grad;
    for (int i = 0; i < 3; ++i) {
      chain->forward(at::ones({2, 8}));
    }
    chain->at<torch::nn::LinearImpl>(0).forward(at::ones({2, 8})); // starts the gather of 1
    model.reset();
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

TEST(Optimizers, ElementwiseOnesTrainAsUnsharded) {
  const std::vector<std::pair<std::string, std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>>> makers{
      {"SGD", [](auto p) { return std::make_unique<torch::optim::SGD>(p, torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true)); }},
      {"Adam", [](auto p) { return std::make_unique<torch::optim::Adam>(p, torch::optim::AdamOptions(1e-2)); }},
      {"AdamW", [](auto p) { return std::make_unique<torch::optim::AdamW>(p, torch::optim::AdamWOptions(1e-2)); }},
      {"RMSprop", [](auto p) { return std::make_unique<torch::optim::RMSprop>(p, torch::optim::RMSpropOptions(1e-2)); }},
      {"Adagrad", [](auto p) { return std::make_unique<torch::optim::Adagrad>(p, torch::optim::AdagradOptions(1e-2)); }},
  };
  for (const auto& [optimizer_name, make] : makers) {
    auto plain = make_subject("mlp");
    std::vector<at::Tensor> parameters;
    for (const auto& [name, tensor] : plain.parameters()) {
      parameters.push_back(tensor);
    }
    auto reference = make(parameters);
    for (int step = 0; step < 5; ++step) {
      plain.loss(step, 0).backward();
      plain.loss(step, 1).backward();
      for (auto& parameter : parameters) {
        parameter.mutable_grad().div_(2);
      }
      reference->step();
      reference->zero_grad();
    }
    ebb::test::spawn_ranks(2, [&, name = optimizer_name, make = make](const auto& group) {
      auto subject = make_subject("mlp");
      auto model = shard_subject(subject, {.mesh = comm::Mesh(group), .wrap = wrap_everything()});
      auto optimizer = make(model.parameters());
      for (int step = 0; step < 5; ++step) {
        subject.loss(step, group->rank()).backward();
        optimizer->step();
        optimizer->zero_grad();
      }
      auto scope = model.full_parameters({.writeback = false});
      const auto trained = subject.parameters();
      for (std::size_t i = 0; i < trained.size(); ++i) {
        EXPECT_TRUE(at::equal(trained[i].second, parameters[i])) << name << " " << trained[i].first;
      }
    });
  }
}

TEST(Optimizers, FusedOnesEqualTheStockOnes) {
  for (const bool adam : {true, false}) {
    const auto run = [&](bool fused) {
      auto subject = make_subject("mlp");
      auto model = shard_subject(subject, {.mesh = comm::Mesh(comm::single()), .wrap = wrap_everything()});
      std::unique_ptr<torch::optim::Optimizer> optimizer;
      const auto adam_options = torch::optim::AdamWOptions(1e-2).weight_decay(0.1);
      const auto sgd_options = torch::optim::SGDOptions(1e-2).momentum(0.9).weight_decay(0.01);
      if (adam) {
        optimizer = fused ? fused_adamw(model.parameters(), adam_options)
                          : std::make_unique<torch::optim::AdamW>(model.parameters(), adam_options);
      } else {
        optimizer = fused ? fused_sgd(model.parameters(), sgd_options)
                          : std::make_unique<torch::optim::SGD>(model.parameters(), sgd_options);
      }
      for (int step = 0; step < 5; ++step) {
        subject.loss(step, 0).backward();
        optimizer->step();
        optimizer->zero_grad();
      }
      return at::cat(model.parameters()).detach();
    };
    EXPECT_TRUE(at::allclose(run(true), run(false), 1e-5, 1e-6)) << (adam ? "AdamW" : "SGD");
  }
}

TEST(Explain, NamesUnitsFramesAndWarnsOfOneUnitThatHoldsNearlyEverything) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    auto chain = make_chain(3);
    auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .wrap = wrap_root()});
    EXPECT_THAT(
        model.explain(), ::testing::AllOf(
                             HasSubstr("full_shard over 2 rank(s): 216 parameters in 1 unit(s)"),
                             HasSubstr("warning: unit '(root)' holds 100%")));
    auto split = make_chain(3);
    auto sharded = fully_shard(split, {.mesh = comm::Mesh(group), .wrap = wrap_by_class({"Linear"})});
    EXPECT_THAT(sharded.explain(), ::testing::AllOf(HasSubstr("in 3 unit(s)"), ::testing::Not(HasSubstr("warning"))));
  });
}

TEST(WrapPolicy, ChoosesUnitsByClassSizeNamePredicateAndNested) {
  const auto units = [](WrapPolicy policy) {
    auto subject = make_subject("gpt");
    auto model = shard_subject(subject, {.mesh = comm::Mesh(comm::single()), .wrap = std::move(policy)});
    const auto text = model.explain();
    return std::count(text.begin(), text.end(), '\n') - 4; // head, titles, frames, peak
  };
  EXPECT_EQ(units(wrap_root()), 1);
  EXPECT_EQ(units(wrap_by_class({"Block"})), 4);
  EXPECT_EQ(units(wrap_by_type<test::BlockImpl>()), 4);
  EXPECT_EQ(units(wrap_by_name({"blocks.0", "blocks.2"})), 3);
  EXPECT_EQ(units(wrap_by_size(3000)), 4);
  EXPECT_EQ(units([](const ModuleInfo& info) { return info.depth == 2; }), 4);
  EXPECT_EQ(units(wrap_any({wrap_by_class({"Block"}), wrap_by_name({"blocks.1.qkv"})})), 5);
}

TEST(WrapPolicy, ByNameRefusesANameThatTheModelLacksAlsoInsideWrapAny) {
  for (const bool nested : {false, true}) {
    auto chain = make_chain(2);
    auto policy = wrap_by_name({"0", "7"});
    if (nested) {
      policy = wrap_any({wrap_by_class({"Linear"}), policy});
    }
    EXPECT_THAT(
        test::error_of([&] { (void)fully_shard(chain, {.mesh = comm::Mesh(comm::single()), .wrap = policy}); }),
        ::testing::AllOf(HasSubstr("got '7'"), HasSubstr("names of modules")));
  }
}

} // namespace
} // namespace ebb::shard
