// What the dispatcher fallback costs an operator whose unit is resident: the same operator on a plain tensor beside it.
// The target is at most 150 ns over plain dispatch. benchmarks/fsdp/run reads the names below.
#include "ebb/comm/init.h"
#include "ebb/shard/fully_shard.h"

#include <benchmark/benchmark.h>
#include <torch/torch.h>

namespace {

struct ModelImpl : torch::nn::Module {
  ModelImpl() {
    scalar = register_parameter("scalar", torch::ones({1}));
    matrix = register_parameter("matrix", torch::randn({8, 8}));
    large = register_parameter("large", torch::randn({512, 512}));
  }
  torch::Tensor scalar, matrix, large;
};
TORCH_MODULE(Model);

/// The same model twice: as it is, and as a single unit sharded over a world of one.
const Model& model(bool sharded) {
  static Model plain;
  static Model paged = [] {
    Model made;
    static auto handle = ebb::fully_shard(
        made,
        {.mesh = ebb::comm::Mesh(ebb::comm::single()), .wrap = ebb::shard::wrap_root(), .sync_module_states = false});
    return made;
  }();
  return sharded ? paged : plain;
}

/// The cheapest operator that reads a parameter.
void item(benchmark::State& state, bool sharded) {
  at::NoGradGuard no_grad;
  const auto& weight = model(sharded)->scalar;
  benchmark::DoNotOptimize(at::_local_scalar_dense(weight));
  for (auto _ : state) {
    benchmark::DoNotOptimize(at::_local_scalar_dense(weight));
  }
}

/// Two parameters in one operator.
void add_two(benchmark::State& state, bool sharded) {
  at::NoGradGuard no_grad;
  const auto &matrix = model(sharded)->matrix, &scalar = model(sharded)->scalar;
  for (auto _ : state) {
    benchmark::DoNotOptimize(matrix.add(scalar));
  }
}

/// A view and a product, as in torch::nn::Linear.
void linear(benchmark::State& state, bool sharded) {
  at::NoGradGuard no_grad;
  const auto x = torch::randn({4, 8});
  const auto& weight = model(sharded)->matrix;
  for (auto _ : state) {
    benchmark::DoNotOptimize(x.matmul(weight.t()));
  }
}

/// A layer of a size that somebody trains.
void linear_512(benchmark::State& state, bool sharded) {
  at::NoGradGuard no_grad;
  const auto x = torch::randn({16, 512});
  const auto& weight = model(sharded)->large;
  for (auto _ : state) {
    benchmark::DoNotOptimize(x.matmul(weight.t()));
  }
}

BENCHMARK_CAPTURE(item, plain, false);
BENCHMARK_CAPTURE(item, sharded, true);
BENCHMARK_CAPTURE(add_two, plain, false);
BENCHMARK_CAPTURE(add_two, sharded, true);
BENCHMARK_CAPTURE(linear, plain, false);
BENCHMARK_CAPTURE(linear, sharded, true);
BENCHMARK_CAPTURE(linear_512, plain, false);
BENCHMARK_CAPTURE(linear_512, sharded, true);

} // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    return 2;
  }
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
