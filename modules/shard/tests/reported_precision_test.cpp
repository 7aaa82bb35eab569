#include "ebb/shard/checkpoint.h"
#include "ebb/shard/sharded_grad_scaler.h"

#include "engine.h"
#include "reported_support.h"

#include <cmath>
#include <limits>
#include <optional>
#include <sstream>

namespace ebb::shard {
namespace {

using test::batch;
using test::built;
using test::expect_gradients;
using test::expect_parameters;
using test::make_chain;

// PyTorch issues 149768, 170862; pytorch/torchtitan issue 766; radixark/miles_diffusion PR 35
TEST(Clipping, GivesTheSameParametersAndNormsAtAnyWorldSize) {
  constexpr double kMaxNorm = 0.05;
  constexpr int kSteps = 3;
  const auto whole = at::linspace(-1, 1, 64).view({8, 8});
  auto plain = make_chain(3);
  torch::optim::SGD reference(plain->parameters(), 0.5);
  std::vector<double> norms;
  for (int step = 0; step < kSteps; ++step) {
    plain->forward(whole + step).pow(2).mean().backward();
    norms.push_back(torch::nn::utils::clip_grad_norm_(plain->parameters(), kMaxNorm));
    EXPECT_GT(norms.back(), kMaxNorm);
    reference.step();
    reference.zero_grad();
  }
  for (const int ranks : {1, 2, 4}) {
    std::vector<std::vector<double>> seen(ranks);
    ebb::test::spawn_ranks(ranks, [&](const auto& group) {
      auto chain = make_chain(3);
      auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1)});
      torch::optim::SGD optimizer(model.parameters(), 0.5);
      for (int step = 0; step < kSteps; ++step) {
        chain->forward(whole.chunk(ranks)[group->rank()] + step).pow(2).mean().backward();
        const auto norm = model.clip_grad_norm_(kMaxNorm);
        EXPECT_NEAR(norm, norms[step], 1e-6 * norms[step]);
        seen[group->rank()].push_back(norm);
        optimizer.step();
        optimizer.zero_grad();
      }
      expect_parameters(model, *chain, *plain, 1e-6);
    });
    for (const auto& rank : seen) {
      EXPECT_EQ(rank, seen[0]);
    }
  }
}

struct Counting : torch::nn::Module {
  Counting()
      : linear(register_module("linear", torch::nn::Linear(4, 4))),
        teacher(register_module("teacher", std::make_shared<torch::nn::Module>("Teacher"))),
        norm(register_module("norm", torch::nn::BatchNorm1d(4))) {
    register_buffer("steps", at::full({2}, 300, at::kLong));
    register_buffer("scale", at::full({4}, 1.0));
    teacher->register_parameter("weight", at::full({4}, 1 + 0x1p-20));
    teacher->register_buffer("offset", at::full({4}, 1 + 0x1p-20)); // rounds in bfloat16
  }
  torch::nn::Linear linear;
  std::shared_ptr<torch::nn::Module> teacher;
  torch::nn::BatchNorm1d norm;
};

// PyTorch issues 93391, 77439, 143900, 146114; facebookresearch/fairscale issues 442, 704; d2go PR 585
TEST(Buffers, RunningStatisticsCountersAndIgnoredModulesKeepTheirDtypesAlsoWhenSaved) {
  auto net = built([] { return std::make_shared<Counting>(); });
  auto model = fully_shard(
      *net, {.mesh = comm::Mesh(comm::single()),
             .wrap = wrap_by_size(1),
             .mixed_precision = mixed_precision("bf16"),
             .ignored = wrap_by_class({"Teacher"})});
  const auto buffers = net->named_buffers();
  EXPECT_EQ(buffers["scale"].scalar_type(), at::kBFloat16); // asked for by the preset
  std::stringstream file;
  {
    auto scope = model.full_parameters({.writeback = false});
    torch::save(net, file);
    scope.close();
  }
  auto loaded = built([] { return std::make_shared<Counting>(); });
  loaded->teacher->named_buffers()["offset"].zero_();
  loaded->named_buffers()["scale"].set_data(at::zeros({4}, at::kBFloat16)); // torch::load() converts nothing
  torch::load(loaded, file);
  for (const auto& module : {net, loaded}) {
    const auto all = module->named_buffers();
    EXPECT_EQ(all["norm.running_mean"].scalar_type(), at::kFloat);
    EXPECT_EQ(all["norm.running_var"].scalar_type(), at::kFloat);
    EXPECT_EQ(all["norm.num_batches_tracked"].scalar_type(), at::kLong);
    EXPECT_TRUE(at::equal(all["steps"], at::full({2}, 300, at::kLong)));
    EXPECT_TRUE(at::equal(all["teacher.offset"], at::full({4}, 1 + 0x1p-20))) << all["teacher.offset"].dtype();
    EXPECT_TRUE(at::equal(module->teacher->named_parameters()["weight"], at::full({4}, 1 + 0x1p-20)));
  }
}

/// A layer with a float32 table of cosines, as rotary embeddings have.
struct Rotary : torch::nn::Module {
  Rotary()
      : query(register_module("query", torch::nn::Linear(8, 8))),
        out(register_module("out", torch::nn::Linear(8, 8))),
        cosines(register_buffer("cosines", at::cos(at::arange(16).view({2, 8}) * 0.37))) {}
  at::Tensor forward(const at::Tensor& x) {
    dtypes.push_back(query(x).scalar_type());
    const auto rotated = query(x) * cosines;
    dtypes.push_back(rotated.scalar_type());
    return out(rotated);
  }
  torch::nn::Linear query, out;
  at::Tensor cosines;
  std::vector<at::ScalarType> dtypes;
};

// PyTorch issues 159359, 148831; NVIDIA-NeMo/Automodel issue 3504
TEST(Recomputation, CastsInputsAsTheFirstRunDidAlsoBesideAFloatBuffer) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    const auto train = [&](bool recompute) {
      auto net = built([] { return std::make_shared<Rotary>(); });
      auto model = fully_shard(
          *net, {.mesh = comm::Mesh(group),
                 .wrap = wrap_by_size(1),
                 .mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
      EXPECT_EQ(net->cosines.scalar_type(), at::kFloat);
      auto x = batch(group->rank()).set_requires_grad(true);
      const auto forward = [&](const at::Tensor& in) { return net->forward(in); };
      const auto y = recompute ? checkpoint(forward, checkpoint(forward, x)) : forward(forward(x));
      y.pow(2).mean().backward();
      EXPECT_EQ(net->dtypes.size(), recompute ? 8U : 4U);
      for (std::size_t i = 0; i < net->dtypes.size(); ++i) {
        EXPECT_EQ(net->dtypes[i], i % 2 ? at::kFloat : at::kBFloat16) << i;
      }
      std::vector<at::Tensor> results{y.detach(), x.grad()};
      for (const auto& leaf : model.parameters()) {
        results.push_back(leaf.grad().clone());
      }
      return results;
    };
    const auto plain = train(false);
    const auto recomputed = train(true);
    for (std::size_t i = 0; i < plain.size(); ++i) {
      EXPECT_TRUE(at::equal(plain[i], recomputed[i])) << i;
    }
  });
}

// PyTorch PR 115710, issues 111650, 82206
TEST(GradientOverflow, OnOneRankStopsTheStepOfAllWithAndWithoutOffload) {
  for (const bool offload : {false, true}) {
    ebb::test::spawn_ranks(3, [&](const auto& group) {
      auto chain = make_chain(3);
      ShardOptions options{.mesh = comm::Mesh(group), .wrap = wrap_by_size(1)};
      if (offload) {
        options.offload = OffloadPolicy{OffloadTier::kFile};
      }
      auto model = fully_shard(chain, options);
      torch::optim::SGD optimizer(model.parameters(), 0.1);
      ShardedGradScaler scaler(group, {.init_scale = 8.0});
      std::vector<at::Tensor> before;
      for (const auto& leaf : model.parameters()) {
        before.push_back(leaf.detach().clone());
      }
      for (const bool overflows : {true, false}) {
        auto loss = chain->forward(batch(group->rank())).pow(2).mean();
        if (overflows && group->rank() == 0) { // in one element, which is in the shard of one rank
          loss = loss + test::layer(chain, 0).bias.select(0, 0) * std::numeric_limits<double>::infinity();
        }
        scaler.scale(loss).backward();
        EXPECT_EQ(scaler.step(optimizer), !overflows);
        scaler.update();
        optimizer.zero_grad();
        EXPECT_EQ(scaler.get_scale(), 4.0);
        bool moved = false;
        for (std::size_t i = 0; i < before.size(); ++i) {
          moved = moved || !at::equal(model.parameters()[i], before[i]);
        }
        EXPECT_EQ(moved, !overflows);
      }
    });
  }
}

// PyTorch issue 196996
TEST(MixedAccumulation, AParameterFirstUsedInTheSynchronisingStepIsReduced) {
  const auto loss_of = [](torch::nn::Sequential chain, int rank, bool all) {
    auto x = test::layer(chain, 0).forward(batch(rank, all).to(test::layer(chain, 0).weight.scalar_type()));
    if (all) {
      x = test::layer(chain, 1).forward(x);
    }
    return x.pow(2).mean();
  };
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    // Each rank's micro-batches are summed in float, then the ranks in order, divided once.
    auto masters = make_chain(2);
    auto compute = make_chain(2);
    compute->to(dtype);
    std::vector<at::Tensor> sums(4);
    for (int rank = 0; rank < 2; ++rank) {
      std::vector<at::Tensor> mine(4);
      for (const bool all : {false, true}) {
        loss_of(compute, rank, all).backward();
        for (std::size_t i = 0; i < 4; ++i) {
          auto& grad = compute->parameters()[i].mutable_grad();
          if (grad.defined()) {
            mine[i] = mine[i].defined() ? mine[i] + grad.to(at::kFloat) : grad.to(at::kFloat);
            grad = at::Tensor();
          }
        }
      }
      for (std::size_t i = 0; i < 4; ++i) {
        sums[i] = rank == 0 ? mine[i] : sums[i] + mine[i];
      }
    }
    for (std::size_t i = 0; i < 4; ++i) {
      masters->parameters()[i].mutable_grad() = sums[i] / 2;
    }
    for (const auto strategy : {Strategy::kFullShard, Strategy::kShardGradOp, Strategy::kNoShard}) {
      ebb::test::spawn_ranks(2, [&](const auto& group) {
        auto chain = make_chain(2);
        auto model = fully_shard(
            chain, {.mesh = comm::Mesh(group),
                    .strategy = strategy,
                    .wrap = wrap_root(), // both layers in one unit: one has accumulated, the other has not
                    .mixed_precision = {.param_dtype = dtype, .reduce_dtype = at::kFloat}});
        {
          const auto scope = model.no_sync();
          loss_of(chain, group->rank(), false).backward();
        }
        loss_of(chain, group->rank(), true).backward();
        expect_gradients(model, *masters);
      });
    }
  }
}

// PyTorch issue 78774, horovod issue 1699, facebookresearch/fairscale PR 565
TEST(HalfMeans, StayFiniteNearTheLargestAndKeepTheSmallest) {
  constexpr int kRanks = 4;
  constexpr double kLargest = 65504;
  constexpr double kSmallest = 0x1p-24;
  for (const double value : {kLargest, 60000.0, -kLargest, kSmallest, 3 * kSmallest}) {
    for (const int replicas : {0, 1, 2, 4}) { // 0: one axis
      for (const auto strategy : {Strategy::kFullShard, Strategy::kNoShard}) {
        ebb::test::spawn_ranks(kRanks, [&](const auto& group) {
          auto chain = make_chain(1);
          const auto mesh =
              replicas == 0 ? comm::Mesh(group) : comm::Mesh::replicate_by_shard(group, replicas, kRanks / replicas);
          auto model = fully_shard(
              chain, {.mesh = mesh,
                      .strategy = strategy,
                      .wrap = wrap_by_size(1),
                      .mixed_precision = {.reduce_dtype = at::kHalf}});
          (chain->forward(at::ones({1, 8})) * value).sum().backward(); // the gradient of each element is the value
          for (const auto& leaf : model.parameters()) {
            EXPECT_TRUE(at::equal(leaf.grad(), at::full_like(leaf, value).detach()))
                << value << " over " << replicas << ": " << leaf.grad();
          }
        });
      }
    }
  }
}

} // namespace
} // namespace ebb::shard
