#include "engine.h"
#include "reported_support.h"

#include <set>

namespace ebb::shard {
namespace {

using test::backward_of_all_ranks;
using test::batch;
using test::built;
using test::bytes_sent;
using test::error_of;
using test::expect_gradients;
using test::expect_parameters;
using test::make_chain;
using ::testing::HasSubstr;

constexpr std::int64_t kWidth = 64;
constexpr std::int64_t kLowRank = 2;
constexpr int kLayers = 4;
constexpr std::int64_t kAdapterNumel = kLayers * 2 * kLowRank * kWidth;

/// A frozen Linear with a trained low-rank update beside it.
struct Lora : torch::nn::Module {
  Lora()
      : torch::nn::Module("Lora"),
        base(register_module("base", torch::nn::Linear(kWidth, kWidth))),
        down(register_parameter("down", at::randn({kLowRank, kWidth}) * 0.1)),
        up(register_parameter("up", at::randn({kWidth, kLowRank}) * 0.1)) {
    for (auto& parameter : base->parameters()) {
      parameter.set_requires_grad(false);
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    return base(x) + at::linear(at::linear(x, down), up);
  }
  torch::nn::Linear base;
  at::Tensor down, up;
};

struct LoraNet : torch::nn::Module {
  LoraNet() {
    for (int i = 0; i < kLayers; ++i) {
      layers.push_back(register_module(std::to_string(i), std::make_shared<Lora>()));
    }
  }
  at::Tensor loss(const at::Tensor& input) {
    auto x = input;
    for (const auto& layer : layers) {
      x = at::tanh(layer->forward(x));
    }
    return x.pow(2).mean();
  }
  std::vector<std::shared_ptr<Lora>> layers;
};

// Bytes of the leaves' gradients, memory that several share once.
std::int64_t gradient_bytes(const ShardedModel& model) {
  std::set<const c10::StorageImpl*> seen;
  std::int64_t bytes = 0;
  for (const auto& leaf : model.parameters()) {
    if (leaf.grad().defined() && seen.insert(leaf.grad().storage().unsafeGetStorageImpl()).second) {
      bytes += static_cast<std::int64_t>(leaf.grad().storage().nbytes());
    }
  }
  return bytes;
}

// PyTorch issues 104690, 91167; Lightning-AI/litgpt issue 1417; pytorch/xla PR 5484
TEST(FrozenParameters, LoraCostsTheGradientsOfItsAdaptersWhateverTheWrapping) {
  constexpr int kRanks = 2;
  constexpr int kSteps = 10;
  const std::vector<std::pair<std::string, WrapPolicy>> wraps{
      {"frozen and trained in one unit", wrap_root()},
      {"in one unit a layer", wrap_by_class({"Lora"})},
      {"frozen units beside trained ones", wrap_by_size(1)}};
  for (const auto& [what, wrap] : wraps) {
    ebb::test::spawn_ranks(kRanks, [&, what = what, wrap = wrap](const auto& group) {
      const auto make = [] { return std::make_shared<LoraNet>(); };
      auto plain = built(make);
      auto untouched = built(make);
      auto net = built(make);
      auto model = fully_shard(*net, {.mesh = comm::Mesh(group), .wrap = wrap});
      torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
      torch::optim::AdamW reference(plain->parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
      // Each trained tensor may be followed by up to 15 elements of padding, and each shard by as many.
      const auto num_units = static_cast<std::int64_t>(model.units().size());
      const auto padded = 4 * (kAdapterNumel + 15 * (2 * kLayers + kRanks * num_units));
      for (int step = 0; step < kSteps; ++step) {
        backward_of_all_ranks(*plain, kRanks, [&](int rank) { return plain->loss(batch(rank, step, kWidth)); });
        const auto sent = bytes_sent(*group, comm::Op::kReduceScatter);
        net->loss(batch(group->rank(), step, kWidth)).backward();
        const auto reduced = bytes_sent(*group, comm::Op::kReduceScatter) - sent;
        EXPECT_GE(reduced, 4 * kAdapterNumel / kRanks) << what;
        EXPECT_LE(reduced, padded / kRanks) << what;
        EXPECT_LE(gradient_bytes(model), padded / kRanks) << what;
        EXPECT_EQ(model.residency().held_bytes, 0) << what;
        expect_gradients(model, *plain);
        optimizer.step();
        optimizer.zero_grad();
        reference.step();
        reference.zero_grad();
      }
      std::int64_t buffers = 0;
      for (const auto& unit : model.engine().units()) {
        buffers += unit->reduce_bytes;
      }
      EXPECT_LE(buffers, padded) << what;
      expect_parameters(model, *net, *plain);
      auto scope = model.full_parameters({.writeback = false});
      for (int i = 0; i < kLayers; ++i) {
        EXPECT_TRUE(at::equal(net->layers[i]->base->weight, untouched->layers[i]->base->weight)) << what;
        EXPECT_TRUE(at::equal(net->layers[i]->base->bias, untouched->layers[i]->base->bias)) << what;
        EXPECT_FALSE(at::equal(net->layers[i]->up, untouched->layers[i]->up)) << what;
      }
    });
  }
}

// PyTorch issues 104690, 91167
TEST(FrozenParameters, AUnitWithAFrozenWeightReducesItsBiasAlone) {
  constexpr int kRanks = 4;
  ebb::test::spawn_ranks(kRanks, [](const auto& group) {
    auto chain = make_chain(2, kWidth);
    auto plain = make_chain(2, kWidth);
    for (auto net : {chain, plain}) {
      for (const int layer : {0, 1}) {
        test::layer(net, layer).weight.set_requires_grad(false);
      }
    }
    auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1)});
    const auto sent = bytes_sent(*group, comm::Op::kReduceScatter);
    chain->forward(batch(group->rank(), 0, kWidth)).pow(2).mean().backward();
    // Per unit 64 elements of bias: 16 a rank, which is also what shards are padded to; three quarters leave a rank.
    EXPECT_EQ(gradient_bytes(model), 2 * kWidth / kRanks * 4);
    EXPECT_EQ(bytes_sent(*group, comm::Op::kReduceScatter) - sent, 2 * kWidth * 4 * (kRanks - 1) / kRanks);
    backward_of_all_ranks(
        *plain, kRanks, [&](int rank) { return plain->forward(batch(rank, 0, kWidth)).pow(2).mean(); });
    expect_gradients(model, *plain);
  });
}

// pytorch/xla PR 5484
TEST(FrozenParameters, FrozenUnitsHoldNothingUnshardedAfterBackward) {
  for (const auto strategy : {Strategy::kFullShard, Strategy::kShardGradOp}) {
    for (const bool input_requires_grad : {false, true}) {
      ebb::test::spawn_ranks(2, [&](const auto& group) {
        auto chain = make_chain(6);
        for (const int frozen : {0, 2, 3, 5}) { // at both ends, and two in a row
          for (auto& parameter : chain[frozen]->parameters()) {
            parameter.set_requires_grad(false);
          }
        }
        auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .strategy = strategy, .wrap = wrap_by_size(1)});
        for (int step = 0; step < 3; ++step) {
          auto x = batch(group->rank(), step).set_requires_grad(input_requires_grad);
          chain->forward(x).sum().backward();
          EXPECT_EQ(model.residency().held_bytes, 0);
          EXPECT_EQ(model.residency().kept_bytes, 0);
          EXPECT_EQ(x.grad().defined(), input_requires_grad);
        }
      });
    }
  }
}

// PyTorch issue 105371
TEST(FrozenParameters, UnfreezingAfterAnEvaluationIsNamedWithEveryStrategy) {
  for (const auto strategy : {Strategy::kFullShard, Strategy::kShardGradOp, Strategy::kNoShard}) {
    auto chain = make_chain(3);
    auto weight = test::layer(chain, 1).weight;
    weight.set_requires_grad(false);
    auto model =
        fully_shard(chain, {.mesh = comm::Mesh(comm::single()), .strategy = strategy, .wrap = wrap_by_size(1)});
    chain->forward(batch(0)).sum().backward();
    {
      const at::NoGradGuard no_grad;
      chain->forward(batch(0));
    }
    weight.set_requires_grad(true);
    EXPECT_THAT(error_of([&] { chain->forward(batch(0)); }), HasSubstr("'1.weight' (unit '1') was frozen"));
    weight.set_requires_grad(false);
    model.zero_grad();
    auto plain = make_chain(3);
    test::layer(plain, 1).weight.set_requires_grad(false);
    plain->forward(batch(0)).sum().backward();
    chain->forward(batch(0)).sum().backward();
    expect_gradients(model, *plain);
  }
}

} // namespace
} // namespace ebb::shard
