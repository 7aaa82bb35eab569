#pragma once

#include "gpt/gpt.h"

#include "ebb/comm/communicator.h"

#include <nlohmann/json_fwd.hpp>

#include <memory>
#include <string>
#include <vector>

namespace ebb::bench {

/// A model and its optimizer under one strategy. step() is what is measured.
class Contender {
 public:
  virtual ~Contender() = default;

  /// One training step on `tokens_BT` and the `targets_BT` to predict; returns the loss before the update.
  at::Tensor step(const at::Tensor& tokens_BT, const at::Tensor& targets_BT);

  at::Tensor loss(const at::Tensor& tokens_BT, const at::Tensor& targets_BT);
  std::int64_t num_parameters() const {
    return num_parameters_;
  }

  /// The whole parameters; empty where they are sharded.
  virtual std::vector<at::Tensor> whole_parameters() const {
    return {};
  }
  /// What memory and traffic are compared with: frame bytes and the like. Read after a step.
  virtual nlohmann::json facts() const;

 protected:
  explicit Contender(const gpt::Config& config);
  /// The optimizer's step; drops the gradients.
  virtual void update() = 0;

  gpt::GPT model_;

 private:
  std::int64_t num_parameters_;
};

const std::vector<std::string>& modes();

/// @param mode       One of modes().
/// @param optimizer  "stock": torch::optim::AdamW; "fused": ebb's, on the kernel behind Python's AdamW(fused=True).
/// @param world      All ranks; not used by "floor", which may pass nullptr.
std::unique_ptr<Contender> make_contender(
    const std::string& mode, const gpt::Config& config, const std::string& optimizer,
    const std::shared_ptr<comm::Communicator>& world);

} // namespace ebb::bench
