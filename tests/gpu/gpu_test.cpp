#include "connect_nccl.h"
#include "ebb/comm/cuda_status.h"
#include "ebb/shard/fully_shard.h"
#include "engine.h"
#include "support/spawn_ranks.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

namespace ebb::shard {
namespace {

using ::testing::HasSubstr;

constexpr int kGpuSteps = 4;
constexpr std::int64_t kGpuWidth = 256;
constexpr std::int64_t kGpuBatch = 32; // of all ranks together

/// Tests of what only a GPU does. Ranks are threads, each on a GPU of its own, over NCCL.
class Gpu : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto status = comm::cuda_status();
    if (status.num_gpus == 0) {
      GTEST_SKIP() << "needs a GPU: " << status.text;
    }
    num_gpus_ = status.num_gpus;
  }
  /// Runs `body` as up to `most` ranks, over NCCL also where it is a single one.
  void on_ranks(int most, const std::function<void(const std::shared_ptr<comm::Communicator>&, at::Device)>& body) {
    const int ranks = std::min(most, num_gpus_);
    const comm::GroupOptions options{.backend = ranks > 1 ? "nccl" : "single", .timeout = std::chrono::seconds(60)};
    ebb::test::spawn_ranks(
        ranks,
        [&](std::shared_ptr<comm::Communicator> group) {
          const at::Device device(at::kCUDA, static_cast<at::DeviceIndex>(group->rank()));
          const c10::OptionalDeviceGuard guard(device);
          if (ranks == 1) {
            const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
            group = comm::connect_nccl(store, group, options, std::make_shared<comm::Health>(store, 0, 1, options));
          }
          body(group, device);
        },
        options);
  }
  int num_gpus_ = 0;
};

torch::nn::Sequential make_layers(at::Device device) {
  static std::mutex mutex; // ranks share the default generator
  const std::lock_guard lock(mutex);
  torch::manual_seed(5);
  torch::nn::Sequential layers;
  for (int i = 0; i < 6; ++i) {
    layers->push_back(torch::nn::Linear(kGpuWidth, kGpuWidth));
    layers->push_back(torch::nn::GELU());
  }
  layers->to(device);
  return layers;
}

at::Tensor batch_of(int step) {
  const auto values = at::arange(kGpuBatch * kGpuWidth, at::kFloat).reshape({kGpuBatch, kGpuWidth});
  return at::sin(values * (0.37 + 0.01 * step));
}

/// Losses of all steps on `rows` of the batch.
template <class Model>
std::vector<at::Tensor> train(
    torch::nn::Sequential& layers, Model& trained, at::Device device, std::int64_t begin, std::int64_t rows) {
  torch::optim::AdamW optimizer(trained.parameters(), torch::optim::AdamWOptions(1e-3));
  std::vector<at::Tensor> losses;
  for (int step = 0; step < kGpuSteps; ++step) {
    auto loss = layers->forward(batch_of(step).narrow(0, begin, rows).to(device)).pow(2).mean();
    loss.backward();
    losses.push_back(loss.detach().clone());
    optimizer.step();
    optimizer.zero_grad();
  }
  return losses;
}

c10::CachingDeviceAllocator::DeviceStats stats_of(at::Device device) {
  return c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
}

TEST_F(Gpu, ShardedTrainingEqualsUnshardedTraining) {
  on_ranks(4, [](const auto& group, at::Device device) {
    auto plain = make_layers(device);
    (void)train(plain, *plain, device, 0, kGpuBatch);
    for (const auto strategy : {Strategy::kFullShard, Strategy::kShardGradOp, Strategy::kNoShard}) {
      auto layers = make_layers(device);
      auto model = fully_shard(layers, {.mesh = comm::Mesh(group), .strategy = strategy, .wrap = wrap_by_size(1)});
      const auto rows = kGpuBatch / group->size();
      (void)train(layers, model, device, group->rank() * rows, rows);
      const auto scope = model.full_parameters({.writeback = false});
      const auto expected = plain->parameters();
      const auto parameters = layers->parameters();
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(at::allclose(parameters[i], expected[i], 1e-4, 1e-5)) << name_of(strategy) << ", " << i;
      }
    }
  });
}

TEST_F(Gpu, LanesAreStreamsOfTheirOwn) {
  on_ranks(1, [](const auto& group, at::Device device) {
    auto layers = make_layers(device);
    auto model = fully_shard(layers, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1)});
    const auto& streams = model.engine().streams();
    ASSERT_TRUE(streams.any());
    const auto compute = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    EXPECT_NE(streams.lane(Lane::kGather), streams.lane(Lane::kReduce));
    EXPECT_NE(streams.lane(Lane::kGather), compute);
    EXPECT_NE(streams.lane(Lane::kReduce), compute);
  });
}

TEST_F(Gpu, FramesCauseNoAllocationRetriesAndTheSameMemoryServesEveryStep) {
  on_ranks(4, [](const auto& group, at::Device device) {
    auto layers = make_layers(device);
    auto model = fully_shard(layers, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1)});
    const auto rows = kGpuBatch / group->size();
    (void)train(layers, model, device, 0, rows);
    const auto warm = stats_of(device);
    for (int again = 0; again < 5; ++again) {
      (void)train(layers, model, device, 0, rows);
    }
    const auto after = stats_of(device);
    EXPECT_EQ(after.num_alloc_retries, 0);
    EXPECT_EQ(after.reserved_bytes[0].current, warm.reserved_bytes[0].current);
    EXPECT_THAT(model.explain(), HasSubstr("reserved; 0 allocations had to be retried"));
  });
}

TEST_F(Gpu, OffloadToPinnedMemoryGivesTheSameBits) {
  on_ranks(1, [](const auto& group, at::Device device) {
    std::vector<std::vector<at::Tensor>> results;
    for (const bool offload : {false, true}) {
      auto layers = make_layers(device);
      ShardOptions options{.mesh = comm::Mesh(group), .wrap = wrap_by_size(1)};
      if (offload) {
        options.offload = OffloadPolicy{.tier = OffloadTier::kHost};
      }
      auto model = fully_shard(layers, options);
      // The optimizers differ, the host's and the GPU's: gradients and the values gathered do not.
      results.emplace_back();
      for (int step = 0; step < 3; ++step) {
        auto loss = layers->forward(batch_of(step).to(device)).pow(2).mean();
        loss.backward();
        results.back().push_back(loss.detach().cpu());
        const at::NoGradGuard no_grad;
        for (auto& leaf : model.parameters()) {
          results.back().push_back(leaf.grad().cpu().clone());
          leaf.copy_((leaf.cpu() - leaf.grad().cpu()).to(leaf.device()));
        }
        model.zero_grad();
      }
      EXPECT_EQ(model.residency().offloaded_bytes > 0, offload);
    }
    ASSERT_EQ(results[0].size(), results[1].size());
    for (std::size_t i = 0; i < results[0].size(); ++i) {
      EXPECT_TRUE(at::equal(results[0][i], results[1][i])) << i;
    }
  });
}

TEST_F(Gpu, AccumulationAndEvaluationBetweenStepsLeaveTheSameGradients) {
  on_ranks(2, [](const auto& group, at::Device device) {
    const auto gradients = [&](const bool without_communication) {
      auto layers = make_layers(device);
      auto model = fully_shard(layers, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1)});
      for (int step = 0; step < 3; ++step) {
        std::optional<NoSync> scope;
        if (without_communication && step < 2) {
          scope.emplace(model.no_sync());
        }
        layers->forward(batch_of(step).to(device)).pow(2).mean().backward();
        const at::NoGradGuard no_grad;
        (void)layers->forward(batch_of(step + 10).to(device));
      }
      std::vector<at::Tensor> found;
      for (const auto& leaf : model.parameters()) {
        found.push_back(leaf.grad().clone());
      }
      return found;
    };
    const auto with = gradients(false);
    const auto without = gradients(true);
    for (std::size_t i = 0; i < with.size(); ++i) {
      EXPECT_TRUE(at::allclose(with[i], without[i], 1e-5, 1e-7)) << i;
    }
  });
}

} // namespace
} // namespace ebb::shard
