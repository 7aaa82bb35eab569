#include "fsdp/adamw.h"

#include "ebb/shard/optim.h"

#include <torch/torch.h>

#include <memory>

namespace ebb::bench {

std::function<void()> make_adamw(const std::string& kind, std::vector<at::Tensor> parameters) {
  TORCH_CHECK_VALUE(kind == "fused" || kind == "stock", "[make_adamw] expected 'fused' or 'stock', got '", kind, "'");
  const auto options = torch::optim::AdamWOptions(1e-3).betas({0.9, 0.999}).eps(1e-8).weight_decay(0.01);
  std::shared_ptr<torch::optim::Optimizer> optimizer;
  if (kind == "fused") {
    optimizer = shard::fused_adamw(std::move(parameters), options);
  } else {
    optimizer = std::make_shared<torch::optim::AdamW>(std::move(parameters), options);
  }
  return [optimizer] { optimizer->step(); };
}

} // namespace ebb::bench
