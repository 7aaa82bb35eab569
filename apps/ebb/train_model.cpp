#include "train_model.h"

#include "doctor_checks.h"

#include "ebb/base/error.h"
#include "ebb/base/rng.h"
#include "ebb/shard/deferred_init.h"
#include "ebb/shard/fully_shard.h"
#include "ebb/shard/module_checkpoints.h"
#include "ebb/shard/replicate.h"
#include "gpt/gpt.h"

#include <torch/script.h>
#include <torch/torch.h>

#include <fmt/core.h>

#include <filesystem>
#include <functional>
#include <map>
#include <optional>

namespace ebb::app {
namespace {

shard::WrapPolicy wrap_policy(const ParallelOptions& options, bool is_gpt) {
  if (options.wrap == "root") {
    return shard::wrap_root();
  }
  if (options.wrap == "size" || (options.wrap == "auto" && !is_gpt)) {
    return shard::wrap_by_size(options.wrap_size);
  }
  TORCH_CHECK_VALUE(
      is_gpt, "--wrap block: a TorchScript model has blocks of its own names; use --wrap size with --wrap-size");
  return shard::wrap_by_class({"Block"});
}

bool is_hybrid(const ParallelOptions& options) {
  return options.strategy.starts_with("hybrid");
}

comm::Mesh mesh_of(const ParallelOptions& options, const std::shared_ptr<comm::Communicator>& world) {
  if (!is_hybrid(options)) {
    return comm::Mesh(world);
  }
  const auto replicas = static_cast<int>(options.replicas);
  return comm::Mesh::replicate_by_shard(world, replicas, world->size() / replicas);
}

shard::OffloadPolicy file_tier(const ParallelOptions& options) {
  return {.tier = shard::OffloadTier::kFile, .folder = options.offload_folder};
}

/// What a block does with its activations; empty: it keeps them.
std::function<torch::Tensor(gpt::Block&, torch::Tensor)> run_block(gpt::GPT& model, const ParallelOptions& options) {
  if (options.activations == "keep") {
    return {};
  }
  shard::CheckpointOptions checkpoint;
  if (options.activations == "offload") {
    checkpoint.offload =
        std::make_shared<shard::ActivationOffload>(shard::ActivationOffloadOptions{.policy = file_tier(options)});
  }
  return [checkpoints = ModuleCheckpoints(*model, shard::wrap_by_class({"Block"}), checkpoint)](
             gpt::Block& block, torch::Tensor x_BTC) { return checkpoints(block, x_BTC); };
}

shard::ShardOptions shard_options(
    const ParallelOptions& options, bool is_gpt, const std::shared_ptr<comm::Communicator>& world) {
  const std::map<std::string, shard::Strategy> strategies{
      {"full_shard", shard::Strategy::kFullShard},
      {"shard_grad_op", shard::Strategy::kShardGradOp},
      {"no_shard", shard::Strategy::kNoShard},
      {"hybrid_shard", shard::Strategy::kHybridShard},
      {"hybrid_shard_zero2", shard::Strategy::kHybridShardZero2}};
  return {
      .mesh = mesh_of(options, world),
      .strategy = strategies.at(options.strategy),
      .wrap = wrap_policy(options, is_gpt),
      .mixed_precision =
          options.precision == "fp32" ? shard::MixedPrecision{} : shard::mixed_precision(options.precision),
      .offload = options.offload == "file" ? std::optional(file_tier(options)) : std::nullopt,
      .frames = static_cast<int>(options.frames),
      .prefetch = static_cast<int>(options.prefetch)};
}

/// Dropout draws from a stream of its own on each rank.
void seed_rank(std::int64_t seed, int rank) {
  torch::manual_seed(seed);
  if (rank > 0) {
    torch::manual_seed(Rng(static_cast<std::uint64_t>(seed)).fork("rank").fork(std::to_string(rank)).next());
  }
}

SpreadModel make_gpt(
    const ModelOptions& options, const ParallelOptions& parallel, const std::shared_ptr<comm::Communicator>& world) {
  const gpt::Config config{
      .vocab = *options.vocab,
      .context = *options.context,
      .d_model = *options.d_model,
      .heads = *options.heads,
      .layers = *options.layers};
  auto deferred = deferred_init([&] { return gpt::GPT(config); });
  auto model = deferred.model();
  SpreadModel result;
  if (parallel.strategy == "replicate") {
    deferred.materialize();
    result.model.parameters = train::replicated_parameters(shard::replicate(model, {.mesh = comm::Mesh(world)}));
  } else {
    result.model.parameters =
        train::sharded_parameters(shard::fully_shard(deferred, shard_options(parallel, /*is_gpt=*/true, world)));
  }
  model->run_block = run_block(model, parallel);
  result.model.logits = [model](const at::Tensor& tokens_BT) mutable { return model(tokens_BT).to(at::kFloat); };
  result.model.loss = [logits = result.model.logits](const at::Tensor& tokens_BT, const at::Tensor& targets_BT) {
    return train::next_token_loss(logits(tokens_BT), targets_BT);
  };
  result.model.set_training = [model](bool training) mutable { model->train(training); };
  result.model.attention_flops_per_token = 12.0 * static_cast<double>(config.layers * config.context * config.d_model);
  result.description = fmt::format(
      "GPT with {} layers of {}, {} heads, context {}, vocabulary {}", config.layers, config.d_model, config.heads,
      config.context, config.vocab);
  return result;
}

torch::jit::Module load_script(const std::string& path) {
  std::error_code error;
  TORCH_CHECK_VALUE(
      std::filesystem::is_regular_file(path, error), "--torchscript: cannot read '", path,
      "'; check the path and its permissions");
  try {
    return torch::jit::load(path);
  } catch (const std::exception& cause) {
    const auto text = message_of(cause);
    EBB_THROW(FormatError, "--torchscript: '", path, "' is no TorchScript archive: ", text.substr(0, text.find('\n')));
  }
}

SpreadModel make_script(
    const ModelOptions& options, const ParallelOptions& parallel, const std::shared_ptr<comm::Communicator>& world) {
  auto model = load_script(options.torchscript);
  SpreadModel result;
  if (parallel.strategy == "replicate") {
    result.model.parameters = train::replicated_parameters(shard::replicate(model, {.mesh = comm::Mesh(world)}));
  } else {
    result.model.parameters =
        train::sharded_parameters(shard::fully_shard(model, shard_options(parallel, /*is_gpt=*/false, world)));
  }
  for (const auto& buffer : model.named_buffers()) {
    result.model.buffers.emplace_back(buffer.name, buffer.value);
  }
  result.model.logits = [model](const at::Tensor& tokens_BT) mutable {
    const auto output = model.forward({tokens_BT});
    TORCH_CHECK_VALUE(
        output.isTensor(), "--torchscript: the model's forward must return logits [B, T, V], got ", output.tagKind());
    return output.toTensor().to(at::kFloat);
  };
  result.model.loss = [logits = result.model.logits](const at::Tensor& tokens_BT, const at::Tensor& targets_BT) {
    return train::next_token_loss(logits(tokens_BT), targets_BT);
  };
  result.model.set_training = [model](bool training) mutable { model.train(training); };
  result.description = fmt::format("TorchScript model {}", options.torchscript);
  return result;
}

} // namespace

void resolve(ModelOptions& options) {
  const auto preset = gpt::preset(options.preset);
  options.context = options.context.value_or(preset.context);
  if (options.torchscript.empty()) {
    options.vocab = options.vocab.value_or(preset.vocab);
    options.d_model = options.d_model.value_or(preset.d_model);
    options.heads = options.heads.value_or(preset.heads);
    options.layers = options.layers.value_or(preset.layers);
    TORCH_CHECK_VALUE(
        *options.d_model % *options.heads == 0, "--d-model: expected a multiple of heads (", *options.heads, "), got ",
        *options.d_model);
    return;
  }
  for (const auto& [name, given] :
       {std::pair{"--layers", options.layers},
        {"--d-model", options.d_model},
        {"--heads", options.heads},
        {"--vocab", options.vocab}}) {
    TORCH_CHECK_VALUE(
        !given, name, " sets a size of the GPT, but --torchscript brings a model of its own; leave one out");
  }
}

void check_trust(const ModelOptions& options, bool trust_code) {
  TORCH_CHECK_VALUE(
      options.torchscript.empty() || trust_code, "--torchscript: '", options.torchscript,
      "' holds code that would run with your rights; add --trust-code if you trust where it comes from");
}

void check_script(const ModelOptions& options, const ParallelOptions& parallel) {
  if (!options.torchscript.empty()) {
    wrap_policy(parallel, /*is_gpt=*/false);
    TORCH_CHECK_VALUE(
        parallel.activations == "keep", "--activations: expected keep with --torchscript, got ", parallel.activations,
        "; what a TorchScript model recomputes is written in the model");
    load_script(options.torchscript);
  }
}

void check_parallel(const ParallelOptions& options, int world_size) {
  TORCH_CHECK_VALUE(
      is_hybrid(options) || options.replicas == 1, "--replicas: expected 1 with --strategy ", options.strategy,
      ", got ", options.replicas, "; copies of shards need hybrid_shard or hybrid_shard_zero2");
  TORCH_CHECK_VALUE(
      world_size % options.replicas == 0, "--replicas: expected a divisor of the ", world_size, " ranks, got ",
      options.replicas);
  TORCH_CHECK_VALUE(
      options.strategy != "replicate" || options.precision == "fp32",
      "--precision: expected fp32 with --strategy replicate, got ", options.precision,
      "; bf16 needs a strategy of fully_shard(), say no_shard");
  TORCH_CHECK_VALUE(
      options.strategy != "replicate" || options.offload == "none",
      "--offload: expected none with --strategy replicate, which keeps the model in memory, got ", options.offload,
      "; choose a sharded strategy");
  TORCH_CHECK_VALUE(
      options.offload_folder.empty() || options.offload == "file" || options.activations == "offload",
      "--offload-folder: expected --offload file or --activations offload beside it, got neither");
}

void check_size(const ModelOptions& options, const ParallelOptions& parallel, int world_size) {
  if (!options.torchscript.empty()) {
    return;
  }
  // In double: sizes within their bounds can multiply beyond 64 bits.
  const auto size = [](const std::optional<std::int64_t>& value) { return static_cast<double>(*value); };
  const double width = size(options.d_model);
  const double parameters = (size(options.vocab) + size(options.context)) * width +
                            size(options.layers) * (12 * width * width + 13 * width) + 2 * width;
  const bool whole = parallel.strategy == "replicate" || parallel.strategy == "no_shard";
  const double kept = 4 * parameters * (whole ? 1.0 : static_cast<double>(parallel.replicas) / world_size);
  const auto memory = usable_memory_bytes({});
  TORCH_CHECK_VALUE(
      !memory || kept <= *memory, "--layers, --d-model, --vocab, --context: a GPT of these sizes has ",
      fmt::format(
          "{:.3g} parameters, {:.3g} GB on each rank, but this machine has {:.3g} GB; use smaller sizes{}", parameters,
          1e-9 * kept, 1e-9 * memory.value_or(0), whole ? " or shard them" : " or more ranks"));
}

SpreadModel make_model(
    const ModelOptions& model, const ParallelOptions& parallel, std::int64_t seed, bool trust_code,
    const std::shared_ptr<comm::Communicator>& world) {
  check_trust(model, trust_code);
  torch::manual_seed(seed);
  auto result = model.torchscript.empty() ? make_gpt(model, parallel, world) : make_script(model, parallel, world);
  seed_rank(seed, world->rank());
  return result;
}

} // namespace ebb::app
