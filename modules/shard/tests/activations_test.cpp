#include "reported_support.h"

#include <map>
#include <optional>
#include <tuple>

namespace ebb::shard {
namespace {

using test::backward_of_all_ranks;
using test::batch;
using test::built;
using test::expect_gradients;
using test::make_chain;

/// What a model of some size passes around.
struct Inputs {
  std::map<std::string, at::Tensor> by_name;
  std::vector<at::Tensor> list;
  std::tuple<at::Tensor, double> scaled;
  std::optional<at::Tensor> mask;
  std::string mode;
};
struct Outputs {
  std::map<std::string, at::Tensor> by_name;
  std::pair<at::Tensor, std::optional<at::Tensor>> pair;
  int layers_run = 0;
};

Inputs inputs_of(int rank, int step) {
  return {
      .by_name = {{"x", batch(rank, step)}, {"ids", at::arange(2)}},
      .list = {batch(rank + 1, step), batch(rank + 2, step)},
      .scaled = {batch(rank, step + 1), 0.5},
      .mask = step % 2 == 0 ? std::optional(batch(rank, step) > 0) : std::nullopt,
      .mode = step % 2 == 0 ? "sum" : "difference"};
}

struct StructuredNet : torch::nn::Module {
  StructuredNet()
      : rows(register_module("rows", torch::nn::Embedding(2, 8))),
        first(register_module("first", torch::nn::Linear(8, 8))),
        second(register_module("second", torch::nn::Linear(8, 8))),
        side(register_module("side", torch::nn::Linear(8, 5))) {}

  Outputs forward(const Inputs& in) {
    auto x = first(in.by_name.at("x") + rows(in.by_name.at("ids")));
    for (const auto& each : in.list) {
      x = in.mode == "sum" ? x + second(each) : x - second(each);
    }
    x = x + std::get<0>(in.scaled) * std::get<1>(in.scaled);
    if (in.mask) {
      x = x.masked_fill(*in.mask, 0);
    }
    return {
        .by_name = {{"x", at::tanh(x)}, {"detached", x.detach()}},
        .pair = {side(x), in.mask ? std::optional(second(x)) : std::nullopt},
        .layers_run = in.mask ? 4 : 3};
  }

  torch::nn::Embedding rows;
  torch::nn::Linear first, second, side;
};

at::Tensor loss_of_outputs(StructuredNet& net, int rank, int step) {
  const auto out = net.forward(inputs_of(rank, step));
  EXPECT_EQ(out.layers_run, step % 2 == 0 ? 4 : 3);
  EXPECT_FALSE(out.by_name.at("detached").requires_grad());
  auto loss = out.by_name.at("x").pow(2).mean() + out.pair.first.pow(2).mean();
  return out.pair.second ? loss + out.pair.second->abs().mean() : loss;
}

// FSDP1's and FSDP2's tests of inputs and outputs
TEST(Activations, MapsTuplesListsAndPlainValuesGoInAndComeOutAsUnsharded) {
  for (const int ranks : {1, 2, 4}) {
    for (const auto strategy : test::kStrategies) {
      ebb::test::spawn_ranks(ranks, [&](const auto& group) {
        const auto make = [] { return std::make_shared<StructuredNet>(); };
        auto net = built(make);
        auto plain = built(make);
        auto model = fully_shard(*net, test::over(group, strategy));
        torch::optim::SGD optimizer(model.parameters(), 0.1);
        torch::optim::SGD reference(plain->parameters(), 0.1);
        for (int step = 0; step < 4; ++step) {
          loss_of_outputs(*net, group->rank(), step).backward();
          backward_of_all_ranks(*plain, ranks, [&](int rank) { return loss_of_outputs(*plain, rank, step); });
          expect_gradients(model, *plain);
          EXPECT_TRUE(strategy == Strategy::kNoShard || model.residency().held_bytes == 0);
          optimizer.step();
          optimizer.zero_grad();
          reference.step();
          reference.zero_grad();
        }
        test::expect_parameters(model, *net, *plain);
      });
    }
  }
}

// FSDP2's test of unused forward outputs
TEST(Activations, AnOutputThatTheLossLeavesOutChangesNothing) {
  for (const int ranks : {1, 2, 4}) {
    for (const auto strategy : test::kStrategies) {
      ebb::test::spawn_ranks(ranks, [&](const auto& group) {
        const auto make = [] { return std::make_shared<StructuredNet>(); };
        auto net = built(make);
        auto plain = built(make);
        auto model = fully_shard(*net, test::over(group, strategy));
        for (int step = 0; step < 4; ++step) {
          const auto loss = [&](StructuredNet& each, int rank) {
            const auto out = each.forward(inputs_of(rank, step));
            return step % 2 == 0 ? out.pair.first.pow(2).mean() : out.by_name.at("x").pow(2).mean();
          };
          loss(*net, group->rank()).backward();
          backward_of_all_ranks(*plain, ranks, [&](int rank) { return loss(*plain, rank); });
          EXPECT_EQ(plain->side->weight.grad().defined(), step % 2 == 0);
          expect_gradients(model, *plain);
          EXPECT_TRUE(strategy == Strategy::kNoShard || model.residency().held_bytes == 0);
          model.zero_grad();
          plain->zero_grad();
        }
      });
    }
  }
}

// FSDP2's test of a forward that takes nothing
TEST(Activations, AForwardWithoutInputsTrains) {
  struct Constant : torch::nn::Module {
    Constant()
        : start(register_parameter("start", at::linspace(-1, 1, 16).view({2, 8}).clone())),
          body(register_module("body", torch::nn::Linear(8, 8))) {}
    at::Tensor forward() {
      return at::tanh(body(start * 2));
    }
    at::Tensor start;
    torch::nn::Linear body;
  };
  for (const int ranks : {1, 2, 4}) {
    ebb::test::spawn_ranks(ranks, [&](const auto& group) {
      const auto make = [] { return std::make_shared<Constant>(); };
      auto net = built(make);
      auto plain = built(make);
      auto model = fully_shard(*net, test::over(group));
      for (int step = 0; step < 2; ++step) {
        (net->forward() * (1 + group->rank())).pow(2).mean().backward();
        backward_of_all_ranks(*plain, ranks, [&](int rank) { return (plain->forward() * (1 + rank)).pow(2).mean(); });
        expect_gradients(model, *plain);
        model.zero_grad();
        plain->zero_grad();
      }
    });
  }
}

// FSDP2's test of hooks that users put on parameters: they see this rank's gradient, whole, before it is reduced.
TEST(Hooks, OfAParameterSeeAndChangeItsGradientOnThisRank) {
  for (const int ranks : {1, 2, 4}) {
    for (const bool before_sharding : {true, false}) {
      ebb::test::spawn_ranks(ranks, [&](const auto& group) {
        auto chain = make_chain(3);
        auto plain = make_chain(3);
        int calls = 0;
        const auto hook = [&](torch::nn::Sequential net, int* count) {
          test::layer(net, 1).weight.register_hook([count](const at::Tensor& grad) {
            *count += grad.sizes() == at::IntArrayRef({8, 8});
            return grad * 4;
          });
        };
        int plain_calls = 0;
        hook(plain, &plain_calls);
        if (before_sharding) {
          hook(chain, &calls);
        }
        auto model = fully_shard(chain, test::over(group));
        if (!before_sharding) {
          hook(chain, &calls);
        }
        for (int step = 0; step < 3; ++step) {
          chain->forward(batch(group->rank(), step)).pow(2).mean().backward();
          EXPECT_EQ(calls, step + 1);
          backward_of_all_ranks(
              *plain, ranks, [&](int rank) { return plain->forward(batch(rank, step)).pow(2).mean(); });
          expect_gradients(model, *plain);
          model.zero_grad();
          plain->zero_grad();
        }
      });
    }
  }
}

// FSDP1's test of hooks on the inputs of a partly frozen unit
TEST(Hooks, OfSeveralInputsOfAUnitRunOnceEach) {
  struct TwoInputs : torch::nn::Module {
    TwoInputs() : a(register_module("a", torch::nn::Linear(8, 8))), b(register_module("b", torch::nn::Linear(8, 8))) {
      a->weight.set_requires_grad(false);
    }
    at::Tensor forward(const at::Tensor& x, const at::Tensor& y) {
      return at::tanh(a(x) * b(y));
    }
    torch::nn::Linear a, b;
  };
  for (const int ranks : {1, 2}) {
    ebb::test::spawn_ranks(ranks, [&](const auto& group) {
      const auto make = [] { return std::make_shared<TwoInputs>(); };
      auto net = built(make);
      auto plain = built(make);
      auto model = fully_shard(*net, {.mesh = comm::Mesh(group), .wrap = wrap_root()});
      for (int step = 0; step < 2; ++step) {
        std::array<int, 2> calls{};
        const auto loss = [&](TwoInputs& each, int rank, bool hooked) {
          auto x = batch(rank, step).set_requires_grad(true) * 1;
          auto y = batch(rank, step + 1).set_requires_grad(true) * 1;
          if (hooked) {
            x.register_hook([&calls](const at::Tensor& grad) { return ++calls[0], grad; });
            y.register_hook([&calls](const at::Tensor& grad) { return ++calls[1], grad; });
          }
          return each.forward(x, y).pow(2).mean();
        };
        loss(*net, group->rank(), true).backward();
        EXPECT_THAT(calls, ::testing::ElementsAre(1, 1));
        EXPECT_EQ(model.residency().held_bytes, 0);
        backward_of_all_ranks(*plain, ranks, [&](int rank) { return loss(*plain, rank, false); });
        expect_gradients(model, *plain);
        model.zero_grad();
        plain->zero_grad();
      }
    });
  }
}

} // namespace
} // namespace ebb::shard
