#include "ebb/shard/deferred_init.h"

#include "counted_memory.h"
#include "support.h"

#include <map>
#include <memory>

namespace ebb::shard {
namespace {

using test::CountedMemory;
using test::Gpt;

/// As models do: layers initialise themselves, then the model initialises them again; it keeps tensors that it registers
/// nowhere; computes some from others; and changes shapes and dtypes of what it has drawn.
struct NetImpl : torch::nn::Module {
  NetImpl()
      : tokens(register_module("tokens", torch::nn::Embedding(200, 64))),
        body(register_module("body", torch::nn::Sequential(torch::nn::Linear(64, 96), torch::nn::Linear(96, 64)))),
        norm(register_module("norm", torch::nn::BatchNorm1d(64))),
        scale(register_parameter("scale", torch::tensor({1.5, 2.5}))),
        mask(at::ones({80, 80}).triu(1)) {
    for (auto& parameter : body->parameters()) {
      torch::nn::init::normal_(parameter, 0, 0.02);
    }
    const at::NoGradGuard no_grad;
    tokens->weight.select(0, 3).fill_(7);
    register_buffer("table", at::randn({100, 50}).mul_(2).add_(1));
    register_buffer("positions", at::arange(10'000).view({100, 100}));
    auto turned = at::empty({70, 90}).uniform_(-1, 1);
    turned.t_();
    register_buffer("turned", turned);
    auto squared = torch::nn::init::orthogonal_(at::empty({80, 80}));
    register_parameter("squared", squared.to(at::kDouble));
    auto rates = torch::tensor({0.5F, 2.0F});
    register_buffer("scaled", at::randn({3000, 2}) * rates);
    rates.fill_(9); // after it was read
    register_buffer("rates", rates);
    register_buffer("picked", at::randperm(4000).masked_fill_(at::arange(4000) > 3000, 5));
  }
  torch::nn::Embedding tokens;
  torch::nn::Sequential body;
  torch::nn::BatchNorm1d norm;
  at::Tensor scale;
  at::Tensor mask;
};
TORCH_MODULE(Net);

void expect_same_tensors(const torch::nn::Module& a, const torch::nn::Module& b) {
  const auto x = a.named_parameters();
  const auto y = b.named_parameters();
  ASSERT_EQ(x.size(), y.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    EXPECT_EQ(x[i].value().scalar_type(), y[i].value().scalar_type()) << x[i].key();
    EXPECT_TRUE(at::equal(x[i].value(), y[i].value())) << x[i].key();
    EXPECT_EQ(x[i].value().requires_grad(), y[i].value().requires_grad()) << x[i].key();
  }
  ASSERT_EQ(a.named_buffers().size(), b.named_buffers().size());
  for (const auto& buffer : a.named_buffers()) {
    const auto other = b.named_buffers()[buffer.key()]; // a copy: the dict is a temporary
    EXPECT_TRUE(at::equal(buffer.value(), other)) << buffer.key();
    EXPECT_EQ(buffer.value().strides(), other.strides()) << buffer.key();
  }
}

bool has_memory(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() != nullptr;
}

TEST(DeferredInit, MaterializesBitEqualToDirectConstruction) {
  torch::manual_seed(5);
  Net eager;
  const auto next = at::rand({1}).item<double>();
  torch::manual_seed(5);
  auto deferred = deferred_init([] { return Net(); });
  EXPECT_FALSE(has_memory(deferred.model()->tokens->weight));
  auto& model = deferred.materialize();
  EXPECT_EQ(at::rand({1}).item<double>(), next) << "the generator ends elsewhere";
  expect_same_tensors(*model, *eager);
  EXPECT_TRUE(at::equal(model->mask, eager->mask)); // held by the model but registered nowhere
  EXPECT_EQ(model->tokens->weight[3][0].item<float>(), 7);
}

// Whatever a layer's constructor does, the result is the same.
template <class Construct>
void expect_deferred_equals_direct(const Construct& construct) {
  torch::manual_seed(7);
  auto eager = construct();
  torch::manual_seed(7);
  auto deferred = deferred_init(construct);
  deferred.materialize();
  ASSERT_GT(eager->parameters().size(), 0U);
  expect_same_tensors(*deferred.model(), *eager);
}

TEST(DeferredInit, BuildsTheLayersOfLibTorch) {
  using namespace torch::nn;
  expect_deferred_equals_direct([] { return LSTM(LSTMOptions(64, 80).num_layers(2).bidirectional(true)); });
  expect_deferred_equals_direct([] { return GRU(64, 80); });
  expect_deferred_equals_direct([] { return Conv2d(Conv2dOptions(32, 48, 3)); });
  expect_deferred_equals_direct([] { return ConvTranspose1d(ConvTranspose1dOptions(32, 48, 5)); });
  expect_deferred_equals_direct([] { return MultiheadAttention(64, 4); });
  expect_deferred_equals_direct([] { return Transformer(TransformerOptions(64, 4, 1, 1)); });
  expect_deferred_equals_direct([] { return EmbeddingBag(300, 64); });
  expect_deferred_equals_direct([] { return Bilinear(40, 40, 40); });
  expect_deferred_equals_direct([] { return BatchNorm2d(5000); });
  expect_deferred_equals_direct([] { return LayerNorm(LayerNormOptions({80, 80})); });
  expect_deferred_equals_direct([] { return PReLU(PReLUOptions().num_parameters(5000)); });
}

TEST(DeferredInit, BuildsWithEveryInitialiser) {
  namespace init = torch::nn::init;
  const auto with = [](auto initialise) {
    expect_deferred_equals_direct([initialise] {
      torch::nn::Linear linear(80, 70);
      initialise(linear->weight);
      return linear;
    });
  };
  with([](at::Tensor w) { init::xavier_normal_(w); });
  with([](at::Tensor w) { init::xavier_uniform_(w, 2); });
  with([](at::Tensor w) { init::kaiming_normal_(w); });
  with([](at::Tensor w) { init::orthogonal_(w); });
  with([](at::Tensor w) { init::sparse_(w, 0.1); });
  with([](at::Tensor w) { init::eye_(w); });
  with([](at::Tensor w) { init::constant_(w, 3); });
}

TEST(DeferredInit, ConvertsInTheConstructor) {
  expect_deferred_equals_direct([] {
    torch::nn::Sequential model(torch::nn::Linear(80, 70), torch::nn::BatchNorm1d(70));
    model->to(at::kBFloat16);
    return model;
  });
}

TEST(DeferredInit, AllocatesNothingWhileItBuilds) {
  CountedMemory memory; // the first draw keeps the generator's state
  auto deferred = deferred_init([] { return torch::nn::Linear(torch::nn::LinearOptions(3000, 2000).bias(false)); });
  const auto generator_state = at::globalContext().defaultGenerator(at::kCPU).get_state().nbytes();
  EXPECT_LE(memory.peak(), static_cast<std::int64_t>(2 * generator_state));
  EXPECT_EQ(deferred.model()->weight.sizes(), at::IntArrayRef({2000, 3000}));
  EXPECT_TRUE(deferred.model()->weight.is_cpu());
  EXPECT_TRUE(deferred.model()->weight.requires_grad());
}

TEST(DeferredInit, MaterializesInNoMoreThanTheModelAndOneTensor) {
  auto deferred = deferred_init([] { return Gpt(256, 64, 128, 4, 4); });
  std::int64_t model = 0;
  std::int64_t largest = 0;
  for (const auto& parameter : deferred.model()->parameters()) {
    model += static_cast<std::int64_t>(parameter.nbytes());
    largest = std::max(largest, static_cast<std::int64_t>(parameter.nbytes()));
  }
  CountedMemory memory;
  deferred.materialize();
  EXPECT_LE(memory.peak(), model + 2 * largest); // and a mask
}

TEST(DeferredInit, ShardsInNoMoreThanTheShardAndTheLargestUnit) {
  constexpr int kRanks = 4;
  const auto construct = [] { // all layers initialise themselves, then the model initialises all of them again
    Gpt gpt(256, 64, 128, 4, 12);
    for (auto& parameter : gpt->parameters()) {
      torch::nn::init::normal_(parameter, 0, 0.02);
    }
    return gpt;
  };
  std::vector<std::unique_ptr<Deferred<Gpt>>> models;
  for (int rank = 0; rank < kRanks; ++rank) {
    models.push_back(std::make_unique<Deferred<Gpt>>(deferred_init(construct)));
  }
  ebb::test::spawn_ranks(kRanks, [&](const auto& group) {
    auto& deferred = *models[group->rank()];
    std::int64_t whole = 0;
    for (const auto& parameter : deferred.model()->parameters()) {
      whole += static_cast<std::int64_t>(parameter.nbytes());
    }
    CountedMemory memory;
    auto model = ebb::fully_shard(deferred, {.mesh = comm::Mesh(group), .wrap = wrap_by_class({"Block"})});
    std::int64_t shards = 0;
    for (const auto& parameter : model.parameters()) {
      shards += static_cast<std::int64_t>(parameter.nbytes());
    }
    EXPECT_LT(shards, whole / 3);
    const auto largest_unit = whole / 12;
    EXPECT_LE(memory.peak(), shards + largest_unit);
  });
}

TEST(DeferredInit, ShardsBitEqualToDirectConstructionAtAnyWorldSizeAndWrapping) {
  torch::manual_seed(5);
  Net eager;
  std::vector<std::unique_ptr<Deferred<Net>>> models;
  for (int i = 0; i < 14; ++i) {
    torch::manual_seed(5);
    models.push_back(std::make_unique<Deferred<Net>>(deferred_init([] { return Net(); })));
  }
  int next = 0;
  for (const auto& wrap : {wrap_root(), wrap_by_size(1000)}) {
    for (const int ranks : {1, 2, 4}) {
      const int first = next;
      next += ranks;
      ebb::test::spawn_ranks(ranks, [&](const auto& group) {
        auto& deferred = *models[first + group->rank()];
        auto model = fully_shard(deferred, {.mesh = comm::Mesh(group), .wrap = wrap});
        EXPECT_EQ(group->traffic().calls_of(comm::Op::kBroadcast), 0);
        const auto scope = model.full_parameters({.writeback = false});
        expect_same_tensors(*deferred.model(), *eager);
        EXPECT_TRUE(at::equal(deferred.model()->mask, eager->mask));
      });
    }
  }
}

TEST(DeferredInit, TrainsAsTheModelBuiltDirectly) {
  torch::manual_seed(9);
  Gpt plain(31, 8, 16, 2, 3);
  const auto tokens = at::arange(16).view({2, 8});
  std::vector<std::unique_ptr<Deferred<Gpt>>> models;
  for (int rank = 0; rank < 2; ++rank) {
    torch::manual_seed(9);
    models.push_back(std::make_unique<Deferred<Gpt>>(deferred_init([] { return Gpt(31, 8, 16, 2, 3); })));
  }
  plain->forward(tokens).pow(2).mean().backward();
  std::map<std::string, at::Tensor> expected;
  for (const auto& parameter : plain->named_parameters()) {
    expected[parameter.key()] = parameter.value().grad().flatten();
  }
  ebb::test::spawn_ranks(2, [&](const auto& group) {
    auto& deferred = *models[group->rank()];
    auto model = fully_shard(deferred, {.mesh = comm::Mesh(group), .wrap = wrap_by_class({"Block"})});
    deferred.model()->forward(tokens).pow(2).mean().backward();
    const auto layout = model.layout();
    const auto leaves = model.named_parameters();
    int compared = 0;
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      if (!layout[i].slices.empty()) {
        const auto part = expected.at(leaves[i].first).narrow(0, layout[i].slices[0].begin, leaves[i].second.numel());
        EXPECT_TRUE(at::allclose(leaves[i].second.grad(), part)) << leaves[i].first;
        ++compared;
      }
    }
    EXPECT_GT(compared, 0);
  });
}

TEST(DeferredInit, RanksSeededDifferentlyGetTheModelOfRankZero) {
  torch::manual_seed(100);
  torch::nn::Linear eager(70, 80);
  std::vector<std::unique_ptr<Deferred<torch::nn::Linear>>> models;
  for (int rank = 0; rank < 2; ++rank) {
    torch::manual_seed(100 + rank);
    models.push_back(
        std::make_unique<Deferred<torch::nn::Linear>>(deferred_init([] { return torch::nn::Linear(70, 80); })));
  }
  ebb::test::spawn_ranks(2, [&](const auto& group) {
    auto& deferred = *models[group->rank()];
    auto model = fully_shard(deferred, {.mesh = comm::Mesh(group)});
    const auto scope = model.full_parameters({.writeback = false});
    expect_same_tensors(*deferred.model(), *eager);
  });
}

TEST(DeferredInit, DrawsFromAGeneratorOfTheConstructors) {
  const auto construct = [](at::Generator generator) {
    torch::nn::Linear linear(70, 80);
    const at::NoGradGuard no_grad;
    linear->weight.normal_(0, 1, generator);
    return linear;
  };
  auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  torch::manual_seed(1);
  auto eager = construct(generator);
  const auto next = at::rand({2}, generator);
  generator.set_current_seed(3);
  torch::manual_seed(1);
  auto deferred = deferred_init([&] { return construct(generator); });
  deferred.materialize();
  expect_same_tensors(*deferred.model(), *eager);
  EXPECT_TRUE(at::equal(at::rand({2}, generator), next));
}

struct TiedImpl : torch::nn::Module {
  TiedImpl()
      : tokens(register_module("tokens", torch::nn::Embedding(100, 64))),
        head(register_module("head", torch::nn::Linear(torch::nn::LinearOptions(64, 100).bias(false)))) {
    head->weight = tokens->weight;
    head->register_parameter("tied", tokens->weight);
  }
  torch::nn::Embedding tokens;
  torch::nn::Linear head;
};

TEST(DeferredInit, TiedParametersStayTied) {
  auto deferred = deferred_init([] { return std::make_shared<TiedImpl>(); });
  auto model = fully_shard(deferred, {.mesh = comm::Mesh(comm::single()), .wrap = wrap_root()});
  auto& net = *deferred.model();
  EXPECT_TRUE(net.head->weight.is_same(net.tokens->weight));
  at::linear(net.tokens->forward(at::arange(4)), net.head->weight).sum().backward();
  EXPECT_TRUE(model.parameters().front().grad().defined());
}

TEST(DeferredInit, KeepsIgnoredParametersWhole) {
  torch::manual_seed(5);
  Net eager;
  torch::manual_seed(5);
  auto deferred = deferred_init([] { return Net(); });
  auto model =
      fully_shard(deferred, {.mesh = comm::Mesh(comm::single()), .ignored_parameters = {"tokens.weight", "scale"}});
  EXPECT_TRUE(at::equal(deferred.model()->tokens->weight, eager->tokens->weight));
  EXPECT_NE(deferred.model()->tokens->weight.data_ptr(), nullptr);
  EXPECT_EQ(model.ignored_parameters().size(), 2U);
}

} // namespace
} // namespace ebb::shard
