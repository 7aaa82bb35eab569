// One rank of one of ebb's contenders. Speaks the protocol of benchmarks/harness/lanes.py on stdin and stdout; peers.py is
// its Python counterpart and does the same in the same order.
#include "fsdp/activations.h"
#include "fsdp/contender.h"
#include "harness/process_memory.h"

#include "ebb/base/log.h"
#include "ebb/comm/init.h"

#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <iostream>
#include <optional>
#include <sstream>

namespace {

using nlohmann::json;
namespace bench = ebb::bench;

struct Arguments {
  bench::Kind kind;
  gpt::Config config;
  std::int64_t batch = 0; ///< Of a micro-batch.
  std::int64_t length = 0;
  int replicate = 1; ///< Copies of the model; more than one: hybrid sharding.
};

using MaybeMesh = std::optional<ebb::comm::Mesh>;

void say(const json& message) {
  std::cout << message.dump() << std::endl;
}

MaybeMesh make_mesh(const ebb::comm::LaunchEnvironment& launch, const Arguments& args) {
  if (args.kind.mode == "floor") {
    return std::nullopt;
  }
  auto world = ebb::comm::init(launch);
  if (args.replicate == 1) {
    return ebb::comm::Mesh(std::move(world));
  }
  return ebb::comm::Mesh::replicate_by_shard(world, args.replicate, world->size() / args.replicate);
}

/// Payload, of the world and of the mesh's groups.
struct Sent {
  std::int64_t total = 0;
  std::int64_t across_hosts = 0;
};

Sent sent_so_far(const ebb::comm::Mesh& mesh) {
  Sent sent;
  const auto add = [&](const ebb::comm::Communicator& group) {
    sent.total += group.traffic().total_bytes_sent();
    sent.across_hosts += group.traffic().total_bytes_across_hosts();
  };
  add(*mesh.world());
  for (const auto& axis : mesh.axes()) {
    if (mesh.axis(axis) != mesh.world()) {
      add(*mesh.axis(axis));
    }
  }
  return sent;
}

json run(bench::Contender& contender, const MaybeMesh& mesh, const Arguments& args, int steps) {
  std::vector<double> times;
  std::vector<double> losses;
  bench::reset_peak();
  const double cpu = bench::cpu_seconds();
  const auto before = mesh ? sent_so_far(*mesh) : Sent();
  for (int i = 0; i < steps; ++i) {
    const auto x = torch::randint(args.config.vocab, {args.batch * args.kind.micro_batches, args.length}, torch::kLong);
    const auto y = x.roll(1, 1);
    const auto begin = std::chrono::steady_clock::now();
    const auto loss = contender.step(x, y);
    times.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    losses.push_back(loss.item<double>());
  }
  json reply{{"event", "ran"}, {"times", times}, {"losses", losses}, {"cpu", bench::cpu_seconds() - cpu}};
  reply["peak_kb"] = bench::peak_kb();
  reply["rss_kb"] = bench::resident_kb();
  reply["facts"] = contender.facts();
  if (mesh) {
    const auto now = sent_so_far(*mesh);
    reply["facts"]["bytes_sent_per_step"] = (now.total - before.total) / steps;
    reply["facts"]["bytes_across_hosts_per_step"] = (now.across_hosts - before.across_hosts) / steps;
  }
  return reply;
}

json measure_activations(bench::Contender& contender, const Arguments& args) {
  const auto x = torch::randint(args.config.vocab, {args.batch, args.length}, torch::kLong);
  const auto parameters = contender.whole_parameters();
  const auto bytes = bench::peak_activation_bytes(parameters, [&] { contender.loss(x, x.roll(1, 1)).backward(); });
  for (auto& parameter : parameters) {
    parameter.mutable_grad() = at::Tensor();
  }
  return json{{"event", "activations"}, {"bytes", bytes}};
}

void serve(const Arguments& args) {
  at::set_num_threads(1);
  at::set_num_interop_threads(1);
  const auto launch = ebb::comm::launch_environment();
  ebb::log::set_rank(launch.rank);
  const auto mesh = make_mesh(launch, args);

  // One step of a tiny model first: it loads the libraries and starts the threads that the process has anyway.
  {
    const gpt::Config tiny{.vocab = 64, .context = 16, .d_model = 16, .heads = 1, .layers = 2};
    const auto contender = bench::make_contender(args.kind, tiny, mesh);
    const auto x = torch::randint(tiny.vocab, {args.kind.micro_batches, 16}, torch::kLong);
    contender->step(x, x.roll(1, 1));
  }
  bench::trim();
  const auto idle_kb = bench::resident_kb();

  const auto contender = bench::make_contender(args.kind, args.config, mesh);
  bench::trim();
  say(
      {{"event", "ready"},
       {"idle_kb", idle_kb},
       {"parameters", contender->num_parameters()},
       {"trainable", contender->num_trainable()},
       {"torch", TORCH_VERSION}});

  torch::manual_seed(100 + static_cast<std::uint64_t>(launch.rank));
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string verb;
    words >> verb;
    if (verb == "run") {
      int steps = 0;
      words >> steps;
      say(run(*contender, mesh, args, steps));
    } else if (verb == "activations") {
      say(measure_activations(*contender, args));
    } else {
      break;
    }
  }
}

} // namespace

int main(int argc, char** argv) {
  Arguments args;
  CLI::App app("One rank of ebb's side of the FSDP benchmark; benchmarks/fsdp/run starts it.");
  app.add_option("--mode", args.kind.mode)->required()->check(CLI::IsMember(bench::modes()));
  app.add_option("--case", args.kind.case_name)->check(CLI::IsMember(bench::cases()));
  app.add_option("--optimizer", args.kind.optimizer)->check(CLI::IsMember({"stock", "fused"}));
  app.add_option("--micro-batches", args.kind.micro_batches)->check(CLI::PositiveNumber);
  app.add_option("--replicate", args.replicate)->check(CLI::PositiveNumber);
  app.add_flag("!--no-backward-prefetch", args.kind.backward_prefetch);
  app.add_option("--vocabulary", args.config.vocab)->required();
  app.add_option("--context", args.config.context)->required();
  app.add_option("--dim", args.config.d_model)->required();
  app.add_option("--heads", args.config.heads)->required();
  app.add_option("--layers", args.config.layers)->required();
  app.add_option("--batch", args.batch)->required();
  app.add_option("--length", args.length)->required();
  CLI11_PARSE(app, argc, argv);
  try {
    serve(args);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
