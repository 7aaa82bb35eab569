#include "engine.h"
#include "reported_support.h"

#include <optional>
#include <sstream>

namespace ebb::shard {
namespace {

using test::backward_of_all_ranks;
using test::batch;
using test::bytes_sent;
using test::make_chain;

constexpr int kMicroSteps = 4;

at::Tensor big_batch(int rank, int step) {
  std::vector<at::Tensor> parts;
  for (int micro = 0; micro < kMicroSteps; ++micro) {
    parts.push_back(batch(rank, 10 * step + micro));
  }
  return at::cat(parts);
}

// One window: each micro-batch's loss divided by their number, communicating after each or after the last.
void accumulate(torch::nn::Sequential chain, ShardedModel& model, int rank, int step, bool sync_each) {
  for (int micro = 0; micro < kMicroSteps; ++micro) {
    std::optional<NoSync> local;
    if (!sync_each && micro + 1 < kMicroSteps) {
      local.emplace(model.no_sync());
    }
    (chain->forward(batch(rank, 10 * step + micro)).pow(2).mean() / kMicroSteps).backward();
  }
}

// PyTorch PR 90546, issue 98494; instructlab/training issue 414
TEST(Windows, FourMicroStepsEqualOneBigBatchWhateverThePrecisionAndOffload) {
  constexpr int kSteps = 3;
  for (const std::string dtype : {"fp32", "bf16"}) {
    const double tolerance = dtype == "fp32" ? 1e-6 : 2e-2; // of bfloat16, 8 bits
    for (const bool sync_each : {false, true}) {
      ebb::test::spawn_ranks(2, [&](const auto& group) {
        std::vector<at::Tensor> in_memory;
        for (const bool offload : {false, true}) {
          auto plain = make_chain(3);
          auto chain = make_chain(3);
          ShardOptions options{
              .mesh = comm::Mesh(group), .wrap = wrap_by_size(1), .mixed_precision = mixed_precision(dtype)};
          if (offload) {
            options.offload = OffloadPolicy{OffloadTier::kFile};
          }
          auto model = fully_shard(chain, options);
          torch::optim::SGD optimizer(model.parameters(), 0.1);
          torch::optim::SGD reference(plain->parameters(), 0.1);
          std::vector<at::Tensor> results;
          for (int step = 0; step < kSteps; ++step) {
            accumulate(chain, model, group->rank(), step, sync_each);
            backward_of_all_ranks(
                *plain, 2, [&](int rank) { return plain->forward(big_batch(rank, step)).pow(2).mean(); });
            const auto layout = model.layout();
            for (std::size_t i = 0; i < layout.size(); ++i) {
              const auto& grad = model.parameters()[i].grad();
              results.push_back(grad.clone());
              if (grad.numel() > 0) {
                const auto whole = plain->parameters()[i].grad().flatten();
                const auto error = (grad - whole.narrow(0, layout[i].slices[0].begin, grad.numel()))
                                       .abs()
                                       .max()
                                       .template item<double>();
                EXPECT_LT(error, tolerance * whole.abs().max().template item<double>()) << layout[i].name;
              }
            }
            optimizer.step();
            optimizer.zero_grad();
            reference.step();
            reference.zero_grad();
          }
          if (in_memory.empty()) {
            in_memory = results;
          }
          for (std::size_t i = 0; i < results.size(); ++i) {
            EXPECT_TRUE(at::equal(results[i], in_memory[i])) << i << ": offloaded gradients differ";
          }
        }
      });
    }
  }
}

// NVIDIA/cosmos-framework issue 161, huggingface/accelerate PR 2531
TEST(Windows, CommunicateAndHoldWhatTheirFormulaSays) {
  constexpr int kUnits = 5;
  constexpr int kRanks = 2;
  constexpr std::int64_t kUnitBytes = 4 * 96; // 64 + 8 elements, padded to two chunks of a multiple of 16
  ebb::test::spawn_ranks(kRanks, [](const auto& group) {
    for (const bool sync_each : {false, true}) {
      auto chain = make_chain(kUnits);
      auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1), .frames = 1, .prefetch = 0});
      for (int window = 0; window < 2; ++window) {
        const auto before = group->traffic();
        accumulate(chain, model, group->rank(), window, sync_each);
        const auto& now = group->traffic();
        const auto calls = [&](comm::Op op) { return now.calls_of(op) - before.calls_of(op); };
        const auto bytes = [&](comm::Op op) {
          return now.bytes_sent[static_cast<std::size_t>(op)] - before.bytes_sent[static_cast<std::size_t>(op)];
        };
        const auto reductions = kUnits * (sync_each ? kMicroSteps : 1);
        EXPECT_EQ(calls(comm::Op::kReduceScatter), reductions);
        EXPECT_EQ(bytes(comm::Op::kReduceScatter), reductions * kUnitBytes / kRanks);
        // One frame: backward finds the last unit, and does not read the first, whose input needs no gradient.
        const auto gathers = kMicroSteps * (kUnits + kUnits - 2);
        EXPECT_EQ(calls(comm::Op::kAllGather), gathers);
        EXPECT_EQ(bytes(comm::Op::kAllGather), gathers * kUnitBytes / kRanks);
        model.zero_grad();
      }
      {
        const auto scope = model.no_sync();
        chain->forward(batch(group->rank())).sum().backward();
        std::int64_t held = 0;
        for (const auto& unit : model.engine().units()) {
          held += static_cast<std::int64_t>(unit->flats.front()->unsynced.nbytes());
        }
        EXPECT_EQ(held, kUnits * kUnitBytes); // unsharded, until they are reduced
      }
      model.zero_grad();
    }
  });
}

// PyTorch issue 154888, verl-project/verl issue 7493
TEST(HybridMeshes, CopiesStayEqualOnFourByOneAndShardsOnOneByFour) {
  constexpr int kRanks = 4;
  constexpr int kUnits = 3;
  for (const int replicas : {4, 1}) {
    for (const auto strategy : {Strategy::kFullShard, Strategy::kHybridShard, Strategy::kHybridShardZero2}) {
      ebb::test::spawn_ranks(kRanks, [&](const auto& group) {
        auto chain = make_chain(kUnits);
        auto plain = make_chain(kUnits);
        const auto mesh = comm::Mesh::replicate_by_shard(group, replicas, kRanks / replicas);
        auto model = fully_shard(chain, {.mesh = mesh, .strategy = strategy, .wrap = wrap_by_size(1)});
        torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
        torch::optim::SGD reference(plain->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
        for (int step = 0; step < 3; ++step) {
          model.reset_stats();
          chain->forward(batch(group->rank(), step)).pow(2).mean().backward();
          EXPECT_EQ(model.stats().all_reduces, replicas == 4 ? kUnits : 0);
          backward_of_all_ranks(
              *plain, kRanks, [&](int rank) { return plain->forward(batch(rank, step)).pow(2).mean(); });
          test::expect_gradients(model, *plain);
          optimizer.step();
          optimizer.zero_grad();
          reference.step();
          reference.zero_grad();
        }
        test::expect_parameters(model, *chain, *plain);
      });
    }
  }
}

// PyTorch issues 98281, 112515, 104258
TEST(IgnoredModules, TrainOnTheirOwnAndAreSavedWithTheModel) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    const auto ignored = wrap_by_name({"1"});
    auto chain = make_chain(3);
    auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1), .ignored = ignored});
    std::vector<at::Tensor> own;
    for (const auto& [name, tensor] : model.ignored_parameters()) {
      own.push_back(tensor);
    }
    torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(1e-2));
    torch::optim::AdamW own_optimizer(own, torch::optim::AdamWOptions(1e-2));
    const auto step = [&](torch::nn::Sequential net, torch::optim::Optimizer& a, torch::optim::Optimizer& b, int i) {
      net->forward(batch(group->rank(), i)).pow(2).mean().backward();
      for (auto* each : {&a, &b}) {
        each->step();
        each->zero_grad();
      }
    };
    for (int i = 0; i < 2; ++i) {
      step(chain, optimizer, own_optimizer, i);
    }
    std::stringstream weights;
    std::stringstream state;
    {
      auto scope = model.full_parameters({.writeback = false});
      torch::save(chain, weights);
      scope.close();
    }
    torch::save(own_optimizer, state);

    auto again = make_chain(3);
    auto resumed = fully_shard(again, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1), .ignored = ignored});
    {
      auto scope = resumed.full_parameters();
      torch::load(again, weights);
      scope.close();
    }
    std::vector<at::Tensor> again_own;
    for (const auto& [name, tensor] : resumed.ignored_parameters()) {
      again_own.push_back(tensor);
    }
    torch::optim::AdamW again_optimizer(again_own, torch::optim::AdamWOptions(1e-2));
    torch::load(again_optimizer, state);
    for (std::size_t i = 0; i < own.size(); ++i) {
      EXPECT_TRUE(at::equal(again_own[i], own[i])) << i;
    }
    chain->forward(batch(group->rank())).pow(2).mean().backward();
    again->forward(batch(group->rank())).pow(2).mean().backward();
    own_optimizer.step();
    again_optimizer.step();
    for (std::size_t i = 0; i < own.size(); ++i) {
      EXPECT_TRUE(at::equal(again_own[i], own[i])) << i;
      EXPECT_TRUE(at::equal(again_own[i].grad(), own[i].grad())) << i;
    }
    for (std::size_t i = 0; i < model.parameters().size(); ++i) {
      EXPECT_TRUE(at::equal(resumed.parameters()[i].grad(), model.parameters()[i].grad())) << i;
    }
  });
}

} // namespace
} // namespace ebb::shard
