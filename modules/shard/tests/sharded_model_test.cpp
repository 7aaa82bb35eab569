#include "support.h"

#include "ebb/shard/optim.h"

#include <map>

namespace ebb::shard {
namespace {

using test::make_chain;
using test::make_subject;
using test::shard_subject;
using test::wrap_everything;

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

// test_fsdp_use_orig_params: groups of parameters by their names
TEST(Optimizers, GroupsOfParametersKeepTheirOwnOptions) {
  const auto groups_of = [](const std::vector<std::pair<std::string, at::Tensor>>& named) {
    std::vector<at::Tensor> weights;
    std::vector<at::Tensor> others;
    for (const auto& [name, tensor] : named) {
      (name.ends_with("weight") ? weights : others).push_back(tensor);
    }
    using Options = torch::optim::AdamWOptions;
    return std::vector<torch::optim::OptimizerParamGroup>{
        {weights, std::make_unique<Options>(Options(1e-2).weight_decay(0.1))},
        {others, std::make_unique<Options>(Options(1e-3).weight_decay(0))}};
  };
  for (const int ranks : {1, 2, 4}) {
    auto plain = make_subject("mlp");
    torch::optim::AdamW reference(groups_of(plain.parameters()), torch::optim::AdamWOptions(1));
    for (int step = 0; step < 4; ++step) {
      for (int rank = 0; rank < ranks; ++rank) {
        plain.loss(step, rank).backward();
      }
      for (const auto& [name, tensor] : plain.parameters()) {
        tensor.mutable_grad().div_(ranks);
      }
      reference.step();
      reference.zero_grad();
    }
    ebb::test::spawn_ranks(ranks, [&](const auto& group) {
      auto subject = make_subject("mlp");
      auto model = shard_subject(subject, {.mesh = comm::Mesh(group), .wrap = wrap_everything()});
      torch::optim::AdamW optimizer(groups_of(model.named_parameters()), torch::optim::AdamWOptions(1));
      for (int step = 0; step < 4; ++step) {
        subject.loss(step, group->rank()).backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      auto scope = model.full_parameters({.writeback = false});
      for (std::size_t i = 0; i < plain.parameters().size(); ++i) {
        EXPECT_TRUE(at::equal(subject.parameters()[i].second, plain.parameters()[i].second)) << i;
      }
    });
  }
}

// LBFGS looks at all parameters at once: on shards every rank would go its own way.
TEST(Optimizers, LbfgsTrainsWholeParametersAsUnsharded) {
  const auto train = [](torch::optim::LBFGS& optimizer, const std::function<at::Tensor()>& loss_of) {
    for (int step = 0; step < 3; ++step) {
      optimizer.step([&] {
        optimizer.zero_grad();
        const auto loss = loss_of();
        loss.backward();
        return loss;
      });
    }
  };
  const auto options = torch::optim::LBFGSOptions(0.1).max_iter(5);
  auto plain = make_subject("mlp");
  std::vector<at::Tensor> parameters;
  for (const auto& [name, tensor] : plain.parameters()) {
    parameters.push_back(tensor);
  }
  torch::optim::LBFGS reference(parameters, options);
  train(reference, [&] { return plain.loss(0, 0); });
  for (const int ranks : {1, 2, 4}) { // with the same batch: the mean of equal numbers, a power of two of them
    ebb::test::spawn_ranks(ranks, [&](const auto& group) {
      auto subject = make_subject("mlp");
      auto model = shard_subject(subject, test::over(group, Strategy::kNoShard));
      torch::optim::LBFGS optimizer(model.parameters(), options);
      train(optimizer, [&] { return subject.loss(0, 0); });
      auto scope = model.full_parameters({.writeback = false});
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_TRUE(at::allclose(subject.parameters()[i].second, parameters[i], 1e-5, 1e-6)) << i;
      }
    });
  }
}

// test_fully_shard_training: what is registered before, in and after each part of a step
TEST(ShardedModel, HandlesNamesAndShapesOfParametersStayAllThroughAStep) {
  for (const int ranks : {1, 2, 4}) {
    for (const ReshardAfterForward reshard :
         {ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward(ranks > 1 ? 2 : 1)}) {
      ebb::test::spawn_ranks(ranks, [&](const auto& group) {
        auto chain = make_chain(3);
        const auto before = chain->named_parameters();
        auto options = test::over(group);
        options.unit_options = [&](const ModuleInfo&) { return UnitOptions{.reshard_after_forward = reshard}; };
        auto model = fully_shard(chain, options);
        const auto leaves = model.parameters();
        torch::optim::SGD optimizer(leaves, 0.1);
        const auto check = [&](const char* when) {
          const auto now = chain->named_parameters();
          ASSERT_EQ(now.size(), before.size());
          for (const auto& parameter : now) {
            const auto* old = before.find(parameter.key());
            ASSERT_TRUE(old) << parameter.key() << " " << when;
            EXPECT_TRUE(parameter.value().is_same(*old)) << parameter.key() << " " << when;
            EXPECT_EQ(parameter.value().dim(), parameter.key().ends_with("weight") ? 2 : 1) << when;
            EXPECT_EQ(parameter.value().size(0), 8) << when;
          }
          EXPECT_TRUE(chain->template at<torch::nn::LinearImpl>(1).weight.is_same(before["1.weight"])) << when;
          for (std::size_t i = 0; i < leaves.size(); ++i) {
            EXPECT_TRUE(model.parameters()[i].is_same(leaves[i])) << i << " " << when;
          }
        };
        check("after sharding");
        for (int step = 0; step < 2; ++step) {
          const auto loss = chain->forward(at::ones({2, 8}) * group->rank()).sum();
          check("after forward");
          loss.backward();
          check("after backward");
          optimizer.step();
          optimizer.zero_grad();
          check("after the step");
        }
      });
    }
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

} // namespace
} // namespace ebb::shard
