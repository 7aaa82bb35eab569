#include "local_parameters.h"

#include <torch/torch.h>

namespace ebb::train {

WholeParameters::WholeParameters(std::vector<Named> parameters) : parameters_(std::move(parameters)) {}

std::vector<Named> WholeParameters::named() const {
  return parameters_;
}

double WholeParameters::clip_grad_norm_(double max_norm) {
  return torch::nn::utils::clip_grad_norm_(tensors_of(parameters_), max_norm);
}

void WholeParameters::zero_grad() {
  for (auto& [name, tensor] : parameters_) {
    tensor.mutable_grad() = at::Tensor();
  }
}

std::shared_ptr<void> WholeParameters::no_sync() {
  return nullptr; // nothing is reduced anyway
}

std::int64_t WholeParameters::num_parameters() const {
  std::int64_t count = 0;
  for (const auto& [name, tensor] : parameters_) {
    count += tensor.numel();
  }
  return count;
}

std::int64_t WholeParameters::bytes() const {
  std::int64_t total = 0;
  for (const auto& [name, tensor] : parameters_) {
    total += static_cast<std::int64_t>(tensor.nbytes());
  }
  return total;
}

std::string WholeParameters::explain() const {
  return "every rank keeps all " + std::to_string(parameters_.size()) + " parameters whole";
}

std::vector<at::Tensor> tensors_of(const std::vector<Named>& named) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(named.size());
  for (const auto& [name, tensor] : named) {
    tensors.push_back(tensor);
  }
  return tensors;
}

std::shared_ptr<ParameterSet> local_parameters(std::vector<Named> parameters) {
  return std::make_shared<WholeParameters>(std::move(parameters));
}

} // namespace ebb::train
