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
