// All-gather and reduce-scatter of the Gloo backend, two ranks as threads of this process. Arguments: elements of the
// whole tensor (fp32), and whether ranks may read each other's memory.
#include "ebb/comm/init.h"

#include <benchmark/benchmark.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <array>

namespace {

constexpr int kRanks = 2;

/// One store for each kind of group, so that the two threads of a benchmark meet.
std::shared_ptr<ebb::comm::Communicator> group(const benchmark::State& state, bool same_host_reads) {
  struct Kind {
    c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
    std::array<std::shared_ptr<ebb::comm::Communicator>, kRanks> ranks;
  };
  static std::array<Kind, 2> kinds;
  auto& kind = kinds[same_host_reads ? 1 : 0];
  auto& mine = kind.ranks[static_cast<std::size_t>(state.thread_index())];
  if (!mine) {
    mine = ebb::comm::connect(kind.store, state.thread_index(), kRanks, {.same_host_reads = same_host_reads});
  }
  return mine;
}

void all_gather(benchmark::State& state) {
  const auto world = group(state, state.range(1) != 0);
  const auto output = torch::empty({state.range(0)});
  const auto input = torch::randn({state.range(0) / kRanks});
  for (auto _ : state) {
    const auto work = world->all_gather(output, input, "bench");
    work->wait();
    work->release();
  }
  state.SetBytesProcessed(state.iterations() * state.range(0) / kRanks * static_cast<std::int64_t>(sizeof(float)));
}

void reduce_scatter(benchmark::State& state) {
  const auto world = group(state, state.range(1) != 0);
  const auto output = torch::empty({state.range(0) / kRanks});
  const auto input = torch::randn({state.range(0)});
  for (auto _ : state) {
    const auto work = world->reduce_scatter(output, input, kRanks, "bench");
    work->wait();
    work->release();
  }
  state.SetBytesProcessed(state.iterations() * state.range(0) / kRanks * static_cast<std::int64_t>(sizeof(float)));
}

void sizes(benchmark::internal::Benchmark* bench) {
  bench->Threads(kRanks)->UseRealTime()->ArgNames({"elements", "reads"});
  for (const std::int64_t reads : {0, 1}) {
    for (const std::int64_t elements : {1 << 12, 1 << 18, 3152384 /* a block of the 26 M GPT */}) {
      bench->Args({elements, reads});
    }
  }
}

BENCHMARK(all_gather)->Apply(sizes);
BENCHMARK(reduce_scatter)->Apply(sizes);

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
