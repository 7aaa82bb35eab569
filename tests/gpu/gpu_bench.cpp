// Steps of a stack of layers on one GPU, plain and sharded over one rank: what paging, lanes and frames cost there, in
// time and in memory. Prints JSON; exits with 77, which ctest takes for a skip, where there is no GPU.
#include "ebb/comm/cuda_status.h"
#include "ebb/comm/init.h"
#include "ebb/shard/fully_shard.h"
#include "ebb/shard/optim.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include <chrono>
#include <cstdio>
#include <exception>
#include <iostream>
#include <optional>

namespace {

constexpr int kLayers = 24;
constexpr std::int64_t kWidth = 4096;
constexpr std::int64_t kRows = 4096;
constexpr int kWarmUp = 3;
constexpr int kSteps = 20;

nlohmann::json measure(bool sharded, at::Device device) {
  torch::manual_seed(1);
  torch::nn::Sequential layers;
  for (int i = 0; i < kLayers; ++i) {
    layers->push_back(torch::nn::Linear(kWidth, kWidth));
    layers->push_back(torch::nn::GELU());
  }
  layers->to(device);
  std::optional<ebb::ShardedModel> model;
  if (sharded) {
    model = ebb::fully_shard(
        layers, {.mesh = ebb::comm::Mesh(ebb::comm::single()), .wrap = ebb::shard::wrap_by_size(1'000'000)});
  }
  auto optimizer = ebb::shard::fused_adamw(model ? model->parameters() : layers->parameters(), {1e-4});
  const auto x = at::randn({kRows, kWidth}, at::TensorOptions().device(device));
  const auto step = [&] {
    layers->forward(x).pow(2).mean().backward();
    optimizer->step();
    optimizer->zero_grad();
  };
  for (int i = 0; i < kWarmUp; ++i) {
    step();
  }
  torch::cuda::synchronize();
  auto* allocator = c10::getDeviceAllocator(device.type());
  allocator->resetPeakStats(device.index());
  const auto before = std::chrono::steady_clock::now();
  for (int i = 0; i < kSteps; ++i) {
    step();
  }
  torch::cuda::synchronize();
  const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - before;
  const auto stats = allocator->getDeviceStats(device.index());
  nlohmann::json result{
      {"step_ms", taken.count() / kSteps},
      {"peak_allocated_bytes", stats.allocated_bytes[0].peak},
      {"peak_active_bytes", stats.active_bytes[0].peak},
      {"peak_reserved_bytes", stats.reserved_bytes[0].peak},
      {"num_alloc_retries", stats.num_alloc_retries}};
  if (model) {
    std::cerr << model->explain();
  }
  optimizer.reset();
  return result;
}

} // namespace

int main() try {
  const auto status = ebb::comm::cuda_status();
  if (status.num_gpus == 0) {
    std::cerr << "skipped: needs a GPU; this is " << status.text << '\n';
    return 77;
  }
  const at::Device device(at::kCUDA, 0);
  nlohmann::json result{
      {"layers", kLayers}, {"width", kWidth}, {"rows", kRows}, {"steps", kSteps}, {"build", status.text}};
  result["plain"] = measure(false, device);
  c10::getDeviceAllocator(device.type())->emptyCache();
  result["sharded"] = measure(true, device);
  result["sharded_to_plain"] = result["sharded"]["step_ms"].get<double>() / result["plain"]["step_ms"].get<double>();
  std::cout << result.dump(2) << '\n';
  return result["sharded"]["num_alloc_retries"].get<std::int64_t>() == 0 ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
