#include "fsdp/contender.h"

#include "ebb/shard/fully_shard.h"
#include "ebb/shard/replicate.h"
#include "fsdp/adamw.h"

#include <torch/torch.h>
#include <nlohmann/json.hpp>

namespace ebb::bench {
namespace {

/// No communication: what the computation alone takes.
class Floor : public Contender {
 public:
  Floor(const Kind& kind, const gpt::Config& config)
      : Contender(kind, config), step_(make_adamw(kind.optimizer, subject_.trainable())) {}

  std::vector<at::Tensor> whole_parameters() const override {
    return subject_.module->parameters();
  }

 private:
  void update() override {
    step_();
    subject_.module->zero_grad();
  }

  std::function<void()> step_;
};

/// The same in bfloat16, with a float32 copy of the parameters that the optimizer works on.
class LowPrecisionFloor : public Contender {
 public:
  LowPrecisionFloor(const Kind& kind, const gpt::Config& config) : Contender(kind, config) {
    for (const auto& parameter : subject_.module->parameters()) {
      masters_.push_back(parameter.detach().clone());
    }
    subject_.module->to(torch::kBFloat16);
    step_ = make_adamw(kind.optimizer, masters_);
  }

 private:
  void update() override {
    const torch::NoGradGuard no_grad;
    const auto parameters = subject_.module->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      masters_[i].mutable_grad() = parameters[i].grad().to(torch::kFloat);
      parameters[i].mutable_grad() = at::Tensor();
    }
    step_();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      masters_[i].mutable_grad() = at::Tensor();
      parameters[i].copy_(masters_[i]);
    }
  }

  std::vector<at::Tensor> masters_;
  std::function<void()> step_;
};

shard::ShardOptions options_for(const Kind& kind, const comm::Mesh& mesh, shard::Strategy strategy) {
  shard::ShardOptions options{
      .mesh = mesh, .strategy = strategy, .wrap = shard::wrap_by_type<gpt::BlockImpl>(), .sync_module_states = false};
  if (kind.case_name == "bf16") {
    options.mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat, .keep_full = {}};
  } else if (kind.case_name == "offload") {
    options.offload = shard::OffloadPolicy{.tier = shard::OffloadTier::kFile};
  }
  return options;
}

class FullyShard : public Contender {
 public:
  FullyShard(const Kind& kind, const gpt::Config& config, const comm::Mesh& mesh, shard::Strategy strategy)
      : Contender(kind, config),
        options_(options_for(kind, mesh, strategy)),
        sharded_(fully_shard(*subject_.module, options_)) {
    std::vector<at::Tensor> trainable;
    for (const auto& leaf : sharded_.parameters()) {
      if (leaf.requires_grad()) {
        trainable.push_back(leaf);
      }
    }
    step_ = make_adamw(kind.optimizer, trainable);
    if (!kind.backward_prefetch) {
      for (const auto& unit : sharded_.units()) {
        sharded_.set_backward_prefetch(unit, {unit}); // Itself, which is there already.
      }
    }
  }

  nlohmann::json facts() const override {
    const auto residency = sharded_.residency();
    const auto stats = sharded_.stats();
    return {
        {"frame_bytes", residency.frame_bytes},
        {"gradient_buffer_bytes", 2 * residency.frame_bytes / (options_.frames + options_.prefetch)},
        {"peak_held_bytes", residency.peak_held_bytes},
        {"offloaded_bytes", residency.offloaded_bytes},
        {"shard_bytes", sharded_.shard_bytes()},
        {"units", sharded_.units().size()},
        {"unshards", stats.unshards},
        {"prefetched", stats.prefetched},
        {"mispredicted", stats.mispredicted},
        {"reduces", stats.reduces},
        {"all_reduces", stats.all_reduces},
        {"wait_s", stats.wait_seconds},
        {"comm_s", stats.comm_seconds},
    };
  }

 private:
  void backward(const at::Tensor& loss, bool last) override {
    if (last) {
      loss.backward();
    } else {
      const auto scope = sharded_.no_sync();
      loss.backward();
    }
  }

  void update() override {
    step_();
    sharded_.zero_grad();
  }

  shard::ShardOptions options_;
  ShardedModel sharded_;
  std::function<void()> step_;
};

class Replicate : public Contender {
 public:
  Replicate(const Kind& kind, const gpt::Config& config, const comm::Mesh& mesh)
      : Contender(kind, config),
        replicated_(replicate(*subject_.module, {.mesh = mesh, .sync_module_states = false})),
        step_(make_adamw(kind.optimizer, replicated_.parameters())) {}

 private:
  void update() override {
    step_();
    replicated_.zero_grad();
  }

  ReplicatedModel replicated_;
  std::function<void()> step_;
};

} // namespace

Contender::Contender(const Kind& kind, const gpt::Config& config) : micro_batches_(kind.micro_batches) {
  torch::manual_seed(0);
  subject_ = make_subject(kind.case_name, config);
  for (const auto& parameter : subject_.module->parameters()) {
    num_parameters_ += parameter.numel();
    num_trainable_ += parameter.requires_grad() ? parameter.numel() : 0;
  }
}

at::Tensor Contender::loss(const at::Tensor& tokens_BT, const at::Tensor& targets_BT) {
  const auto logits = subject_.logits(tokens_BT).to(torch::kFloat);
  return torch::nn::functional::cross_entropy(logits.view({-1, logits.size(-1)}), targets_BT.view(-1));
}

void Contender::backward(const at::Tensor& loss, bool /*last*/) {
  loss.backward();
}

at::Tensor Contender::step(const at::Tensor& tokens_BT, const at::Tensor& targets_BT) {
  const auto tokens = tokens_BT.chunk(micro_batches_);
  const auto targets = targets_BT.chunk(micro_batches_);
  at::Tensor total;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    auto value = loss(tokens[i], targets[i]);
    if (micro_batches_ > 1) {
      value = value / micro_batches_;
    }
    backward(value, i + 1 == tokens.size());
    total = total.defined() ? total + value.detach() : value.detach();
  }
  update();
  return total;
}

nlohmann::json Contender::facts() const {
  return nlohmann::json::object();
}

const std::vector<std::string>& modes() {
  static const std::vector<std::string> names{"full_shard", "shard_grad_op", "no_shard", "replicate", "floor"};
  return names;
}

std::unique_ptr<Contender> make_contender(
    const Kind& kind, const gpt::Config& config, const std::optional<comm::Mesh>& mesh) {
  const auto& mode = kind.mode;
  if (mode == "floor") {
    if (kind.case_name == "bf16") {
      return std::make_unique<LowPrecisionFloor>(kind, config);
    }
    return std::make_unique<Floor>(kind, config);
  }
  const bool plain = kind.case_name == "plain" && kind.micro_batches == 1;
  TORCH_CHECK_VALUE(
      plain || mode == "full_shard", "[make_contender] mode '", mode, "' has no case '", kind.case_name, "' with ",
      kind.micro_batches, " micro-batches; use full_shard or floor");
  if (mode == "replicate") {
    return std::make_unique<Replicate>(kind, config, mesh.value());
  }
  const auto strategy = mode == "full_shard"      ? shard::Strategy::kFullShard
                        : mode == "shard_grad_op" ? shard::Strategy::kShardGradOp
                                                  : shard::Strategy::kNoShard;
  TORCH_CHECK_VALUE(
      strategy != shard::Strategy::kNoShard || mode == "no_shard", "[make_contender] no mode '", mode,
      "'; see modes()");
  return std::make_unique<FullyShard>(kind, config, mesh.value(), strategy);
}

} // namespace ebb::bench
