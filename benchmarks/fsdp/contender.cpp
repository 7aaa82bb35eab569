#include "fsdp/contender.h"

#include "ebb/shard/fully_shard.h"
#include "ebb/shard/replicate.h"
#include "fsdp/adamw.h"

#include <nlohmann/json.hpp>

namespace ebb::bench {
namespace {

/// No communication: what the computation alone takes.
class Floor : public Contender {
 public:
  Floor(const gpt::Config& config, const std::string& optimizer)
      : Contender(config), step_(make_adamw(optimizer, model_->parameters())) {}

  std::vector<at::Tensor> whole_parameters() const override {
    return model_->parameters();
  }

 private:
  void update() override {
    step_();
    model_->zero_grad();
  }

  std::function<void()> step_;
};

class FullyShard : public Contender {
 public:
  FullyShard(
      const gpt::Config& config, const std::string& optimizer, const std::shared_ptr<comm::Communicator>& world,
      shard::Strategy strategy)
      : Contender(config),
        options_{
            .mesh = comm::Mesh(world),
            .strategy = strategy,
            .wrap = shard::wrap_by_type<gpt::BlockImpl>(),
            .sync_module_states = false},
        sharded_(fully_shard(model_, options_)),
        step_(make_adamw(optimizer, sharded_.parameters())) {}

  nlohmann::json facts() const override {
    const auto residency = sharded_.residency();
    const auto stats = sharded_.stats();
    return {
        {"frame_bytes", residency.frame_bytes},
        {"gradient_buffer_bytes", 2 * residency.frame_bytes / (options_.frames + options_.prefetch)},
        {"peak_held_bytes", residency.peak_held_bytes},
        {"shard_bytes", sharded_.shard_bytes()},
        {"unshards", stats.unshards},
        {"prefetched", stats.prefetched},
        {"mispredicted", stats.mispredicted},
        {"reduces", stats.reduces},
    };
  }

 private:
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
  Replicate(const gpt::Config& config, const std::string& optimizer, const std::shared_ptr<comm::Communicator>& world)
      : Contender(config),
        replicated_(replicate(model_, {.mesh = comm::Mesh(world), .sync_module_states = false})),
        step_(make_adamw(optimizer, replicated_.parameters())) {}

 private:
  void update() override {
    step_();
    replicated_.zero_grad();
  }

  ReplicatedModel replicated_;
  std::function<void()> step_;
};

} // namespace

Contender::Contender(const gpt::Config& config) : model_(nullptr), num_parameters_(0) {
  torch::manual_seed(0);
  model_ = gpt::GPT(config);
  for (const auto& parameter : model_->parameters()) {
    num_parameters_ += parameter.numel();
  }
}

at::Tensor Contender::loss(const at::Tensor& tokens_BT, const at::Tensor& targets_BT) {
  const auto logits = model_(tokens_BT);
  return torch::nn::functional::cross_entropy(logits.view({-1, logits.size(-1)}), targets_BT.view(-1));
}

at::Tensor Contender::step(const at::Tensor& tokens_BT, const at::Tensor& targets_BT) {
  const auto value = loss(tokens_BT, targets_BT);
  value.backward();
  update();
  return value.detach();
}

nlohmann::json Contender::facts() const {
  return nlohmann::json::object();
}

const std::vector<std::string>& modes() {
  static const std::vector<std::string> names{"full_shard", "shard_grad_op", "no_shard", "replicate", "floor"};
  return names;
}

std::unique_ptr<Contender> make_contender(
    const std::string& mode, const gpt::Config& config, const std::string& optimizer,
    const std::shared_ptr<comm::Communicator>& world) {
  if (mode == "floor") {
    return std::make_unique<Floor>(config, optimizer);
  }
  if (mode == "replicate") {
    return std::make_unique<Replicate>(config, optimizer, world);
  }
  const auto strategy = mode == "full_shard"      ? shard::Strategy::kFullShard
                        : mode == "shard_grad_op" ? shard::Strategy::kShardGradOp
                                                  : shard::Strategy::kNoShard;
  TORCH_CHECK_VALUE(
      strategy != shard::Strategy::kNoShard || mode == "no_shard", "[make_contender] no mode '", mode,
      "'; see modes()");
  return std::make_unique<FullyShard>(config, optimizer, world, strategy);
}

} // namespace ebb::bench
