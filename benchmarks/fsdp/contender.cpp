#include "fsdp/contender.h"

#include "fsdp/adamw.h"

#include <nlohmann/json.hpp>

namespace ebb::bench {
namespace {

/// No communication: what the computation alone takes.
class Floor : public Contender {
 public:
  Floor(const gpt::Config& config, const std::string& optimizer)
      : Contender(config), update_(make_adamw(optimizer, model_->parameters())) {}

  std::vector<at::Tensor> whole_parameters() const override {
    return model_->parameters();
  }

 private:
  void update() override {
    update_();
  }

  std::function<void()> update_;
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
  static const std::vector<std::string> names{"floor"};
  return names;
}

std::unique_ptr<Contender> make_contender(
    const std::string& mode, const gpt::Config& config, const std::string& optimizer, const std::shared_ptr<comm::Communicator>& world) {
  if (mode == "floor") {
    return std::make_unique<Floor>(config, optimizer);
  }
  TORCH_CHECK_VALUE(false, "[make_contender] no mode '", mode, "'");
}

} // namespace ebb::bench
