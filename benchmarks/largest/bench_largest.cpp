// One rank of ebb's side of the largest-model benchmark: builds a GPT of so many layers without memory for it, shards it,
// takes a few steps and says what they gave, one JSON object a line. largest/peers.py is its Python counterpart.
#include "fsdp/adamw.h"
#include "harness/process_memory.h"

#include "ebb/base/log.h"
#include "ebb/comm/init.h"
#include "ebb/shard/checkpoint.h"
#include "ebb/shard/deferred_init.h"
#include "ebb/shard/fully_shard.h"
#include "gpt/gpt.h"

#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <malloc.h>

#include <cerrno>
#include <cinttypes>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <map>
#include <new>
#include <string>
#include <string_view>

namespace {

using nlohmann::json;
namespace bench = ebb::bench;

struct Arguments {
  std::string mode;
  gpt::Config config;
  std::int64_t length = 0;
  int steps = 0;
};

void say(const json& message) {
  std::cout << message.dump() << std::endl;
}

/// gpt::GPTImpl::forward() with each block recomputed in backward.
at::Tensor loss_of(gpt::GPTImpl& model, const at::Tensor& tokens_BT, const at::Tensor& targets_BT) {
  auto x_BTC = model.tokens(tokens_BT) + model.positions(torch::arange(tokens_BT.size(1), tokens_BT.options()));
  for (auto& block : model.blocks) {
    x_BTC = ebb::checkpoint([block](const at::Tensor& in) mutable { return block->forward(in); }, x_BTC);
  }
  namespace F = torch::nn::functional;
  const auto logits_BTV = F::linear(model.norm(x_BTC), model.tokens->weight);
  return F::cross_entropy(logits_BTV.view({-1, logits_BTV.size(-1)}), targets_BT.view(-1));
}

/// What one step does after, or in, backward.
std::function<void()> make_update(const std::string& mode, ebb::ShardedModel& sharded) {
  if (mode != "ebb_in_backward") {
    return [step = bench::make_adamw("fused", sharded.parameters()), sharded]() mutable {
      step();
      sharded.zero_grad();
    };
  }
  std::map<std::string, std::function<void()>> steps;
  for (const auto& [name, leaf] : sharded.named_parameters()) {
    steps.emplace(name, bench::make_adamw("fused", {leaf}));
  }
  sharded.set_optimizer_in_backward([steps = std::move(steps)](const std::string& name, at::Tensor& leaf) {
    steps.at(name)();
    leaf.mutable_grad() = at::Tensor();
  });
  return [] {};
}

/// Resident memory that is no file's, in kB.
std::int64_t anonymous_kb() {
  std::ifstream status("/proc/self/status");
  std::int64_t kb = 0;
  for (std::string line; std::getline(status, line);) {
    if (std::sscanf(line.c_str(), "RssAnon: %" SCNd64, &kb) == 1) {
      break;
    }
  }
  return kb;
}

json heap() {
  const auto info = mallinfo2();
  return {{"arena", info.arena}, {"arena_free", info.fordblks}, {"mapped", info.hblkhd}};
}

void train(const Arguments& args) {
  at::set_num_threads(1);
  at::set_num_interop_threads(1);
  const auto launch = ebb::comm::launch_environment();
  ebb::log::set_rank(launch.rank);
  const auto world = ebb::comm::init(launch);
  const auto idle_kb = anonymous_kb();

  torch::manual_seed(0);
  auto deferred = ebb::deferred_init([&] { return gpt::GPT(args.config); });
  auto sharded = ebb::shard::fully_shard(
      deferred,
      {.mesh = ebb::comm::Mesh(world), .wrap = ebb::shard::wrap_by_type<gpt::BlockImpl>(), .sync_module_states = false});
  auto& model = *deferred.model();
  const auto update = make_update(args.mode, sharded);
  say(
      {{"event", "ready"},
       {"parameters", sharded.num_parameters()},
       {"idle_kb", idle_kb},
       {"rss_kb", bench::resident_kb()},
       {"torch", TORCH_VERSION}});

  torch::manual_seed(100 + static_cast<std::uint64_t>(launch.rank));
  const auto x = torch::randint(args.config.vocab, {1, args.length}, torch::kLong);
  const auto y = x.roll(1, 1);
  for (int i = 0; i < args.steps; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    auto loss = loss_of(model, x, y);
    const auto value = loss.item<double>();
    loss.backward();
    const auto backward_kb = bench::resident_kb();
    loss = at::Tensor();
    update();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    say(
        {{"event", "step"},
         {"loss", value},
         {"seconds", seconds.count()},
         {"after_backward_kb", backward_kb},
         {"rss_kb", bench::resident_kb()},
         {"peak_kb", bench::peak_kb()}});
  }
  const auto residency = sharded.residency();
  say(
      {{"event", "done"},
       {"peak_kb", bench::peak_kb()},
       {"heap", heap()},
       {"frame_bytes", residency.frame_bytes},
       {"peak_held_bytes", residency.peak_held_bytes},
       {"shard_bytes", sharded.shard_bytes()}});
}

bool is_out_of_memory(const std::exception& error) {
  return dynamic_cast<const std::bad_alloc*>(&error) || dynamic_cast<const c10::OutOfMemoryError*>(&error) ||
      std::string_view(error.what()).find("t allocate memory") != std::string_view::npos;
}

} // namespace

int main(int argc, char** argv) {
  Arguments args;
  CLI::App app("One rank of ebb's side of the largest-model benchmark; benchmarks/largest/run starts it.");
  app.add_option("--mode", args.mode)->required()->check(CLI::IsMember({"ebb", "ebb_in_backward"}));
  app.add_option("--vocabulary", args.config.vocab)->required();
  app.add_option("--dim", args.config.d_model)->required();
  app.add_option("--heads", args.config.heads)->required();
  app.add_option("--layers", args.config.layers)->required();
  app.add_option("--length", args.length)->required();
  app.add_option("--steps", args.steps)->required();
  CLI11_PARSE(app, argc, argv);
  args.config.context = args.length;
  try {
    train(args);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return is_out_of_memory(error) ? ENOMEM : 1;
  }
  return 0;
}
