#include "engine.h"
#include "reported_support.h"

#include "ebb/shard/sharded_grad_scaler.h"

#include <sstream>

namespace ebb::shard {
namespace {

using test::backward_of_all_ranks;
using test::batch;
using test::built;
using test::error_of;
using test::expect_gradients;
using test::expect_parameters;
using test::make_chain;
using ::testing::AllOf;
using ::testing::HasSubstr;

template <class Model>
std::string saved(ShardedModel& model, const std::shared_ptr<Model>& net) {
  std::stringstream file;
  auto scope = model.full_parameters({.writeback = false});
  torch::save(net, file);
  scope.close();
  return file.str();
}

template <class Model>
void load(ShardedModel& model, std::shared_ptr<Model> net, const std::string& text) {
  std::stringstream file(text);
  auto scope = model.full_parameters();
  torch::load(net, file);
  scope.close();
}

/// A scalar, a single element, a (2, 3) and a layer: on four ranks most of their shards are empty.
struct Small : torch::nn::Module {
  Small()
      : temperature(register_parameter("temperature", at::full({}, 1.5))),
        one(register_parameter("one", at::full({1}, 0.5))),
        two(register_parameter("two", at::randn({2, 3}))),
        out(register_module("out", torch::nn::Linear(3, 2))) {}
  at::Tensor loss(int rank, int step) {
    const auto x = batch(rank, step).narrow(1, 0, 2);
    return (out(at::tanh(x.matmul(two) * temperature)) + one).pow(2).mean();
  }
  at::Tensor temperature, one, two;
  torch::nn::Linear out;
};

const auto make_small = [] { return std::make_shared<Small>(); };

// PyTorch PR 132934
TEST(ParameterShapes, ALearnableScalarTrainsAndIsSavedAndLoadedAtAnotherWorldSize) {
  std::mutex mutex;
  std::map<int, std::string> files;
  for (const int ranks : {1, 4}) {
    ebb::test::spawn_ranks(ranks, [&](const auto& group) {
      auto net = built(make_small);
      auto plain = built(make_small);
      auto model = fully_shard(*net, test::over(group));
      torch::optim::SGD optimizer(model.parameters(), 0.1);
      torch::optim::SGD reference(plain->parameters(), 0.1);
      for (int step = 0; step < 3; ++step) {
        net->loss(group->rank(), step).backward();
        backward_of_all_ranks(*plain, group->size(), [&](int rank) { return plain->loss(rank, step); });
        expect_gradients(model, *plain);
        optimizer.step();
        optimizer.zero_grad();
        reference.step();
        reference.zero_grad();
      }
      expect_parameters(model, *net, *plain);
      auto file = saved(model, net);
      const std::lock_guard lock(mutex);
      files[group->size()] = std::move(file);
    });
  }
  for (const int ranks : {1, 4}) {
    ebb::test::spawn_ranks(ranks, [&](const auto& group) {
      auto net = built(make_small, /*seed=*/9);
      auto model = fully_shard(*net, test::over(group));
      const auto& file = files.at(5 - group->size()); // what the other number of ranks has written
      load(model, net, file);
      auto written = built(make_small, /*seed=*/11);
      std::stringstream stream(file);
      torch::load(written, stream);
      EXPECT_NE(written->temperature.template item<float>(), 1.5F);
      EXPECT_EQ(net->temperature.dim(), 0);
      EXPECT_EQ(net->temperature.template item<float>(), written->temperature.template item<float>());
      expect_parameters(model, *net, *written);
    });
  }
}

// PyTorch issues 137342, 99174, PR 94835
TEST(ParameterShapes, EmptyShardsTakePartInClippingAndScaling) {
  constexpr int kRanks = 4;
  ebb::test::spawn_ranks(kRanks, [](const auto& group) {
    auto net = built(make_small);
    auto plain = built(make_small);
    auto model = fully_shard(*net, test::over(group));
    std::int64_t empty = 0;
    for (const auto& leaf : model.parameters()) {
      empty += leaf.numel() == 0;
    }
    EXPECT_GT(empty, 0);
    EXPECT_EQ(model.parameters().front().numel() == 0, group->rank() != 0);
    torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(1e-2));
    torch::optim::AdamW reference(plain->parameters(), torch::optim::AdamWOptions(1e-2));
    ShardedGradScaler scaler(group, {.init_scale = 1024.0});
    for (int step = 0; step < 3; ++step) {
      scaler.scale(net->loss(group->rank(), step)).backward();
      scaler.unscale_(optimizer);
      const auto norm = model.clip_grad_norm_(0.05);
      EXPECT_TRUE(scaler.step(optimizer));
      scaler.update();
      optimizer.zero_grad();
      backward_of_all_ranks(*plain, kRanks, [&](int rank) { return plain->loss(rank, step); });
      EXPECT_NEAR(norm, torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.05), 1e-6);
      EXPECT_GT(norm, 0.05);
      reference.step();
      reference.zero_grad();
    }
    expect_parameters(model, *net, *plain, 1e-5);
    auto again = built(make_small, /*seed=*/9);
    auto loaded = fully_shard(*again, test::over(group));
    load(loaded, again, saved(model, net));
    expect_parameters(loaded, *again, *plain, 1e-5);
  });
}

struct Strided : torch::nn::Module {
  Strided()
      : transposed(register_parameter("transposed", at::randn({6, 8}).t().clone())), // clone() keeps strides
        kernel(
            register_parameter("kernel", (at::randn({6, 2, 3, 3}) * 0.2).contiguous(at::MemoryFormat::ChannelsLast))),
        pointwise(register_parameter("pointwise", at::randn({6, 6, 1, 1}).contiguous(at::MemoryFormat::ChannelsLast))),
        gapped(register_parameter("gapped", at::empty_strided({8, 3}, {6, 2}).normal_())) {}
  at::Tensor loss(int rank, int step) {
    const auto image = batch(rank, step, 32).view({1, 2, 4, 8}).contiguous(at::MemoryFormat::ChannelsLast);
    const auto features = at::conv2d(at::conv2d(image, kernel, {}, 1, 1), pointwise).mean({2, 3});
    return at::tanh(at::matmul(at::linear(features, transposed), gapped)).pow(2).mean();
  }
  at::Tensor transposed, kernel, pointwise, gapped;
};

// pytorch/torchtitan PR 1180, PyTorch PR 137382: such weights train with the right values. They keep their strides, so
// that operators choose the kernels that they would choose without ebb. Only gaps go: what is not dense becomes row-major.
TEST(ParameterShapes, TransposedAndChannelsLastWeightsKeepTheirStridesAndTrainBitEqual) {
  const auto make = [] { return std::make_shared<Strided>(); };
  for (const auto strategy : {Strategy::kFullShard, Strategy::kNoShard}) {
    ebb::test::spawn_ranks(2, [&](const auto& group) {
      auto net = built(make);
      auto plain = built(make);
      plain->gapped.set_data(plain->gapped.contiguous());
      auto model = fully_shard(*net, test::over(group, strategy));
      for (const auto& parameter : plain->named_parameters()) {
        EXPECT_EQ(net->named_parameters()[parameter.key()].strides(), parameter.value().strides()) << parameter.key();
      }
      expect_parameters(model, *net, *plain);
      torch::optim::AdamW optimizer(model.parameters(), 0.1);
      torch::optim::AdamW reference(plain->parameters(), 0.1);
      for (int step = 0; step < 3; ++step) {
        net->loss(group->rank(), step).backward();
        backward_of_all_ranks(*plain, 2, [&](int rank) { return plain->loss(rank, step); });
        expect_gradients(model, *plain);
        optimizer.step();
        optimizer.zero_grad();
        reference.step();
        reference.zero_grad();
      }
      expect_parameters(model, *net, *plain);
      auto again = built(make, /*seed=*/9);
      auto loaded = fully_shard(*again, test::over(group, strategy));
      load(loaded, again, saved(model, net));
      expect_parameters(loaded, *again, *plain);
      EXPECT_EQ(again->kernel.strides(), plain->kernel.strides());
    });
  }
}

TEST(ParameterShapes, LayoutSaysInWhichOrderTheElementsOfAStridedParameterLie) {
  const auto make = [] { return std::make_shared<Strided>(); };
  ebb::test::spawn_ranks(2, [&](const auto& group) {
    auto net = built(make);
    const auto plain = built(make);
    auto model = fully_shard(*net, test::over(group));
    std::map<std::string, std::vector<std::int64_t>> orders;
    const auto leaves = model.named_parameters();
    const auto layouts = model.layout();
    for (std::size_t i = 0; i < layouts.size(); ++i) {
      const auto& [name, shape, dtype, slices, order] = layouts[i];
      orders[name] = order;
      const auto whole = plain->named_parameters()[name].detach();
      const auto flat = order.empty() ? whole.reshape(-1) : whole.permute(order).reshape(-1);
      for (const auto& slice : slices) {
        EXPECT_TRUE(at::equal(leaves[i].second.detach(), flat.slice(0, slice.begin, slice.end))) << name;
      }
    }
    EXPECT_EQ(orders["transposed"], (std::vector<std::int64_t>{1, 0}));
    EXPECT_EQ(orders["kernel"], (std::vector<std::int64_t>{0, 2, 3, 1}));
    EXPECT_TRUE(orders["gapped"].empty());
  });
}

TEST(ParameterShapes, ARankWithOtherStridesIsNamed) {
  ebb::test::spawn_ranks(2, [&](const auto& group) {
    auto net = built([] { return std::make_shared<Strided>(); });
    if (group->rank() == 1) {
      net->kernel.set_data(net->kernel.contiguous());
    }
    const auto error = error_of([&] { (void)fully_shard(*net, test::over(group)); });
    EXPECT_THAT(error, HasSubstr("parameter 'kernel' [6, 2, 3, 3] float with strides [18, 1, 6, 2]")) << error;
  });
}

TEST(ParameterShapes, ReplicasKeepStridesInTheirGradientsToo) {
  const auto make = [] { return std::make_shared<Strided>(); };
  ebb::test::spawn_ranks(2, [&](const auto& group) {
    auto net = built(make);
    auto plain = built(make);
    auto model = replicate(*net, {.mesh = comm::Mesh(group)});
    net->loss(group->rank(), 0).backward();
    backward_of_all_ranks(*plain, 2, [&](int rank) { return plain->loss(rank, 0); });
    for (const auto& parameter : plain->named_parameters()) {
      const auto grad = net->named_parameters()[parameter.key()].grad();
      EXPECT_TRUE(at::equal(grad, parameter.value().grad())) << parameter.key();
      EXPECT_EQ(grad.strides(), parameter.value().grad().strides()) << parameter.key();
    }
  });
}

/// Float, double and half parameters, and an integer one that is read.
struct Dtypes : torch::nn::Module {
  Dtypes()
      : single(register_parameter("single", at::randn({5, 8}))),
        exact(register_parameter("exact", at::randn({3, 5}, at::kDouble))),
        half(register_parameter("half", at::ones({3}, at::kHalf))),
        order(register_parameter("order", at::arange(3).flip(0), /*requires_grad=*/false)) {}
  at::Tensor loss(int rank) {
    const auto hidden = at::tanh(at::linear(batch(rank), single)).to(at::kDouble);
    return (at::linear(hidden, exact).index_select(1, order) * half.to(at::kDouble)).pow(2).mean();
  }
  at::Tensor single, exact, half, order;
};

TEST(ParameterShapes, SeveralDtypesInOneUnitTrainEachInItsOwn) {
  const auto make = [] { return std::make_shared<Dtypes>(); };
  ebb::test::spawn_ranks(2, [&](const auto& group) {
    auto net = built(make);
    auto plain = built(make);
    auto model = fully_shard(*net, {.mesh = comm::Mesh(group), .wrap = wrap_root()});
    EXPECT_EQ(model.units().size(), 1U);
    for (int step = 0; step < 2; ++step) {
      net->loss(group->rank()).backward();
      backward_of_all_ranks(*plain, 2, [&](int rank) { return plain->loss(rank); });
      for (const auto& [name, leaf] : model.named_parameters()) {
        const auto dtype = plain->named_parameters()[name].scalar_type();
        EXPECT_EQ(leaf.scalar_type(), dtype) << name;
        EXPECT_TRUE(!leaf.grad().defined() || leaf.grad().scalar_type() == dtype) << name;
      }
      expect_gradients(model, *plain, 1e-3); // half
      model.zero_grad();
      plain->zero_grad();
    }
    expect_parameters(model, *net, *plain);
  });
}

TEST(ParameterShapes, ParametersOnTheMetaDeviceAreRefusedByName) {
  auto chain = make_chain(1);
  chain->push_back(torch::nn::Linear(2, 2));
  chain->ptr(1)->register_parameter("scale", at::empty({3}, at::kMeta));
  EXPECT_THAT(
      error_of([&] { (void)fully_shard(chain, test::over(comm::single())); }),
      AllOf(HasSubstr("'1.scale' is on the meta device"), HasSubstr("ebb::deferred_init()")));
}

// pytorch/torchtitan PR 1180
TEST(ParameterShapes, AParameterRegisteredAsAViewIsToldToBeCloned) {
  auto chain = make_chain(1);
  chain->ptr(0)->register_parameter("turned", at::ones({6, 8}).t());
  EXPECT_THAT(
      error_of([&] { (void)fully_shard(chain, test::over(comm::single())); }),
      AllOf(HasSubstr("'0.turned' was registered as a view"), HasSubstr("register its clone()")));
}

// FSDP2 refuses to copy its modules.
TEST(ParameterShapes, ACloneOfAShardedModelIsAPlainModelOfItsOwn) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    auto chain = make_chain(3);
    auto plain = make_chain(3);
    auto model = fully_shard(chain, test::over(group));
    const auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(chain->clone()); // gathers: collective
    ASSERT_TRUE(copy);
    model.reset();
    test::expect_values(*copy, *plain);
    EXPECT_NE(copy->parameters()[0].data_ptr(), nullptr);
    const auto gathers = model.stats().unshards;
    copy->forward(batch(group->rank())).sum().backward(); // this rank's own
    plain->forward(batch(group->rank())).sum().backward();
    EXPECT_EQ(model.stats().unshards, gathers);
    EXPECT_TRUE(at::equal(copy->parameters()[0].grad(), plain->parameters()[0].grad()));
    EXPECT_FALSE(model.parameters()[0].grad().defined());
    {
      const at::NoGradGuard no_grad;
      for (auto& parameter : copy->parameters()) {
        parameter.zero_();
      }
    }
    expect_parameters(model, *chain, *plain);
  });
}

// PyTorch issues 116553, 118520, 137151
TEST(ParameterShapes, NothingKeepsTheMemoryOfTheUnshardedModel) {
  constexpr int kRanks = 4;
  ebb::test::spawn_ranks(kRanks, [](const auto& group) {
    auto chain = make_chain(3, 32);
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
    for (const auto& parameter : chain->parameters()) {
      storages.emplace_back(
          c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(parameter.storage().unsafeGetStorageImpl()));
    }
    auto model = fully_shard(chain, test::over(group));
    chain->forward(batch(group->rank(), 0, 32)).sum().backward();
    for (std::size_t i = 0; i < storages.size(); ++i) {
      EXPECT_TRUE(storages[i].expired()) << i;
    }
    // (1,024 + 32) elements a unit over four ranks, each shard to a multiple of 16.
    constexpr std::size_t kShardBytes = 272 * 4;
    for (const auto& leaf : model.parameters()) {
      EXPECT_EQ(leaf.storage().nbytes(), kShardBytes);
      EXPECT_EQ(leaf.grad().storage().nbytes(), kShardBytes);
    }
    EXPECT_EQ(model.shard_bytes(), static_cast<std::int64_t>(3 * kShardBytes));
  });
}

} // namespace
} // namespace ebb::shard
