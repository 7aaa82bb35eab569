#include "fsdp/adamw.h"

#include <torch/torch.h>

#include <memory>

namespace ebb::bench {
namespace {

constexpr double kLearningRate = 1e-3, kBeta1 = 0.9, kBeta2 = 0.999, kEps = 1e-8, kWeightDecay = 0.01;

class FusedAdamW {
 public:
  explicit FusedAdamW(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {
    for (const auto& parameter : parameters_) {
      first_moments_.push_back(at::zeros_like(parameter));
      second_moments_.push_back(at::zeros_like(parameter));
      steps_.push_back(at::zeros({}, at::kFloat));
    }
  }

  void step() {
    at::NoGradGuard no_grad;
    std::vector<at::Tensor> gradients;
    gradients.reserve(parameters_.size());
    for (auto& parameter : parameters_) {
      gradients.push_back(parameter.grad());
    }
    at::_foreach_add_(steps_, 1);
    at::_fused_adamw_(
        parameters_, gradients, first_moments_, second_moments_, /*max_exp_avg_sqs=*/{}, steps_, kLearningRate, kBeta1,
        kBeta2, kWeightDecay, kEps, /*amsgrad=*/false, /*maximize=*/false);
  }

 private:
  std::vector<at::Tensor> parameters_, first_moments_, second_moments_, steps_;
};

} // namespace

std::function<void()> make_adamw(const std::string& kind, std::vector<at::Tensor> parameters) {
  if (kind == "fused") {
    return [optimizer = std::make_shared<FusedAdamW>(std::move(parameters))] { optimizer->step(); };
  }
  TORCH_CHECK_VALUE(kind == "stock", "[make_adamw] expected 'fused' or 'stock', got '", kind, "'");
  auto options = torch::optim::AdamWOptions(kLearningRate).betas({kBeta1, kBeta2}).eps(kEps).weight_decay(kWeightDecay);
  return [optimizer = std::make_shared<torch::optim::AdamW>(std::move(parameters), options)] { optimizer->step(); };
}

} // namespace ebb::bench
