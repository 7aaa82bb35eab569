#include "ebb/train/optimizer.h"

#include "ebb/base/error.h"
#include "ebb/shard/optim.h"

#include <torch/torch.h>

#include <algorithm>
#include <sstream>

namespace ebb::train {
namespace {

class TorchOptimizer final : public Optimizer {
 public:
  explicit TorchOptimizer(std::unique_ptr<torch::optim::Optimizer> torch) : torch_(std::move(torch)) {}

  void step(double learning_rate) override {
    for (auto& group : torch_->param_groups()) {
      group.options().set_lr(learning_rate);
    }
    torch_->step();
  }
  std::string save() const override {
    torch::serialize::OutputArchive archive;
    torch_->save(archive);
    std::ostringstream out;
    archive.save_to(out);
    return std::move(out).str();
  }
  void load(const std::string& bytes) override {
    torch::serialize::InputArchive archive;
    archive.load_from(bytes.data(), bytes.size());
    torch_->load(archive);
  }

 private:
  std::unique_ptr<torch::optim::Optimizer> torch_;
};

std::unique_ptr<torch::optim::Optimizer> make_torch(
    const TrainOptions& options, const std::string& name, std::vector<at::Tensor> parameters) {
  namespace optim = torch::optim;
  const std::tuple betas(options.betas[0], options.betas[1]);
  if (name == "adamw") {
    return shard::fused_adamw(
        std::move(parameters), optim::AdamWOptions(options.lr).betas(betas).weight_decay(options.weight_decay));
  }
  if (name == "adam") {
    return std::make_unique<optim::Adam>(
        std::move(parameters), optim::AdamOptions(options.lr).betas(betas).weight_decay(options.weight_decay));
  }
  if (name == "sgd") {
    return shard::fused_sgd(
        std::move(parameters),
        optim::SGDOptions(options.lr).momentum(options.momentum).weight_decay(options.weight_decay));
  }
  if (name == "rmsprop") {
    return std::make_unique<optim::RMSprop>(
        std::move(parameters),
        optim::RMSpropOptions(options.lr).momentum(options.momentum).weight_decay(options.weight_decay));
  }
  if (name == "adagrad") {
    return std::make_unique<optim::Adagrad>(
        std::move(parameters), optim::AdagradOptions(options.lr).weight_decay(options.weight_decay));
  }
  TORCH_CHECK_VALUE(
      name != "lbfgs",
      "[make_optimizer] optimizer lbfgs cannot train a sharded model: it needs inner products over whole parameters "
      "and several losses a step, while a rank holds slices; use adamw, adam, sgd, rmsprop or adagrad");
  TORCH_CHECK_VALUE(
      false, "[make_optimizer] expected optimizer adamw, adam, sgd, rmsprop or adagrad, got '", options.optimizer, "'");
}

} // namespace

std::unique_ptr<Optimizer> make_optimizer(const TrainOptions& options, std::vector<at::Tensor> parameters) {
  auto name = options.optimizer;
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  return std::make_unique<TorchOptimizer>(make_torch(options, name, std::move(parameters)));
}

} // namespace ebb::train
