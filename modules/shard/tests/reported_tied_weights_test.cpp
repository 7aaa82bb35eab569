#include "ebb/shard/deferred_init.h"

#include "reported_support.h"

#include <sstream>

namespace ebb::shard {
namespace {

using test::backward_of_all_ranks;
using test::batch;
using test::built;
using test::error_of;
using test::expect_gradients;
using test::expect_parameters;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kTiedSteps = 5;

struct Layer : torch::nn::Module {
  explicit Layer(const at::Tensor& bias)
      : weight(register_parameter("weight", at::randn({8, 8}) * 0.3)), bias(register_parameter("bias", bias)) {}
  at::Tensor forward(const at::Tensor& x) {
    return at::linear(x, weight, bias);
  }
  at::Tensor weight, bias;
};

/// Two layers with one bias.
struct SharedBias : torch::nn::Module {
  SharedBias() {
    const auto bias = at::randn({8});
    a = register_module("a", std::make_shared<Layer>(bias));
    b = register_module("b", std::make_shared<Layer>(bias));
  }
  at::Tensor forward(const at::Tensor& x) {
    return b->forward(at::tanh(a->forward(x)));
  }
  std::shared_ptr<Layer> a, b;
};

struct Part : torch::nn::Module {
  explicit Part(const torch::nn::Linear& shared)
      : own(register_module("own", torch::nn::Linear(8, 8))), shared(register_module("shared", shared)) {}
  at::Tensor forward(const at::Tensor& x) {
    return shared(at::tanh(own(x)));
  }
  torch::nn::Linear own, shared;
};

/// Two parts that have one module in common.
struct SharedModule : torch::nn::Module {
  SharedModule() {
    const torch::nn::Linear shared(8, 8);
    a = register_module("a", std::make_shared<Part>(shared));
    b = register_module("b", std::make_shared<Part>(shared));
  }
  at::Tensor forward(const at::Tensor& x) {
    return b->forward(a->forward(x));
  }
  std::shared_ptr<Part> a, b;
};

/// An embedding whose table is the head's weight.
struct TiedHead : torch::nn::Module {
  TiedHead()
      : tokens(register_module("tokens", torch::nn::Embedding(11, 8))),
        body(register_module("body", torch::nn::Linear(8, 8))),
        head(register_module("head", std::make_shared<torch::nn::Module>("Head"))) {
    head->register_parameter("weight", tokens->weight);
  }
  at::Tensor loss(int rank, int step) {
    const auto input = at::remainder(at::arange(6) * (2 + rank) + step, 11);
    return at::cross_entropy_loss(
        at::linear(at::tanh(body(tokens(input))), head->named_parameters()["weight"]), at::remainder(input + 1, 11));
  }
  torch::nn::Embedding tokens;
  torch::nn::Linear body;
  std::shared_ptr<torch::nn::Module> head;
};

template <class Model>
void train_beside_one_process(const test::Group& group, Strategy strategy, const WrapPolicy& wrap) {
  const auto make = [] { return std::make_shared<Model>(); };
  auto plain = built(make);
  auto net = built(make);
  auto model = fully_shard(*net, {.mesh = comm::Mesh(group), .strategy = strategy, .wrap = wrap});
  const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
  torch::optim::SGD optimizer(model.parameters(), options);
  std::vector<at::Tensor> distinct; // the model lists a tied parameter once for each of its names
  for (const auto& [name, leaf] : model.named_parameters()) {
    distinct.push_back(plain->named_parameters()[name]);
  }
  torch::optim::SGD reference(distinct, options);
  for (int step = 0; step < kTiedSteps; ++step) {
    for (int rank = 0; rank < group->size(); ++rank) {
      plain->forward(batch(rank, step)).pow(2).mean().backward();
    }
    for (auto& parameter : distinct) {
      parameter.mutable_grad().div_(group->size());
    }
    net->forward(batch(group->rank(), step)).pow(2).mean().backward();
    expect_gradients(model, *plain);
    if (strategy != Strategy::kNoShard) {
      EXPECT_EQ(model.residency().held_bytes, 0);
    }
    optimizer.step();
    optimizer.zero_grad();
    reference.step();
    reference.zero_grad();
  }
  expect_parameters(model, *net, *plain);
}

// PyTorch issue 83052
TEST(TiedWeights, ABiasSharedByTwoUnitsTrainsAsUnsharded) {
  for (const auto strategy : test::kStrategies) {
    test::at_world_sizes([&](const auto& group) {
      train_beside_one_process<SharedBias>(group, strategy, wrap_by_name({"a", "b"}));
    });
  }
  const auto net = built([] { return std::make_shared<SharedBias>(); });
  const auto model = fully_shard(*net, {.mesh = comm::Mesh(comm::single()), .wrap = wrap_by_name({"a", "b"})});
  EXPECT_THAT(model.units(), ElementsAre("a", "b"));
  EXPECT_EQ(model.parameters().size(), 3U);
}

// pytorch/torchtitan issue 2817, PyTorch PR 179532
TEST(TiedWeights, AModuleUnderTwoUnitsTrainsAsUnsharded) {
  for (const auto strategy : test::kStrategies) {
    test::at_world_sizes([&](const auto& group) {
      for (const auto& wrap :
           {wrap_by_name({"a", "b"}), wrap_by_name({"a.shared", "a", "b"}), wrap_by_size(1), wrap_root()}) {
        train_beside_one_process<SharedModule>(group, strategy, wrap);
      }
    });
  }
}

// pytorch/torchtitan issue 2817
TEST(TiedWeights, ShardingOnePartAndThenTheOtherNamesTheSharedParameter) {
  const auto net = built([] { return std::make_shared<SharedModule>(); });
  const ShardOptions options{.mesh = comm::Mesh(comm::single()), .wrap = wrap_by_size(1)};
  const auto first = fully_shard(*net->a, options);
  EXPECT_THAT(
      error_of([&] { (void)fully_shard(*net->b, options); }),
      AllOf(HasSubstr("'shared.weight' is sharded already"), HasSubstr("on the outermost module")));
}

// NVIDIA-NeMo/Automodel PR 2213, PR 2511; PyTorch PR 128076
TEST(TiedWeights, ADeferredTieLivesThroughSavingAndLoading) {
  test::at_world_sizes([](const auto& group) {
    const ShardOptions options{.mesh = comm::Mesh(group), .wrap = wrap_by_size(1)};
    const auto make = [] { return deferred_init([] { return std::make_shared<TiedHead>(); }); };
    auto deferred = built(make);
    auto model = fully_shard(deferred, options);
    auto& net = *deferred.model();
    torch::optim::SGD optimizer(model.parameters(), 0.5);
    for (int step = 0; step < 3; ++step) {
      net.loss(group->rank(), step).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    std::stringstream file;
    {
      auto scope = model.full_parameters({.writeback = false});
      torch::save(deferred.model(), file);
      scope.close();
    }
    auto again = built(make, /*seed=*/99);
    auto loaded = fully_shard(again, options);
    {
      auto scope = loaded.full_parameters();
      torch::load(again.model(), file); // the file has the table under both of its names
      scope.close();
    }
    EXPECT_EQ(loaded.parameters().size(), 3U);
    EXPECT_TRUE(again.model()->tokens->weight.is_same(again.model()->head->named_parameters()["weight"]));
    const auto loss = net.loss(group->rank(), 7);
    const auto resumed = again.model()->loss(group->rank(), 7);
    EXPECT_EQ(resumed.template item<float>(), loss.template item<float>());
    loss.backward();
    resumed.backward();
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(at::equal(loaded.parameters()[i].grad(), model.parameters()[i].grad())) << i;
    }
  });
}

// verl-project/verl issue 7834
TEST(TiedWeights, ValuesOfRank0ReachTiedParametersOnce) {
  std::mutex mutex;
  std::vector<at::Tensor> tables(3);
  ebb::test::spawn_ranks(3, [&](const auto& group) {
    const auto net = built([] { return std::make_shared<TiedHead>(); }, 10 + group->rank());
    const auto mine = net->tokens->weight.detach().clone();
    auto model = fully_shard(*net, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1)});
    EXPECT_EQ(group->traffic().calls_of(comm::Op::kBroadcast), 3); // table, weight and bias
    auto scope = model.full_parameters({.writeback = false});
    EXPECT_TRUE(net->tokens->weight.is_same(net->head->named_parameters()["weight"]));
    EXPECT_EQ(at::equal(net->tokens->weight, mine), group->rank() == 0);
    const std::lock_guard lock(mutex);
    tables[group->rank()] = net->head->named_parameters()["weight"].detach().clone();
  });
  EXPECT_TRUE(at::equal(tables[0], tables[1]));
  EXPECT_TRUE(at::equal(tables[0], tables[2]));
}

} // namespace
} // namespace ebb::shard
