#pragma once

#include "gpt/gpt.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace ebb::bench {

/// The model that is trained, and how its logits are computed: for most cases a GPT as it is.
struct Subject {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const at::Tensor& tokens_BT)> logits;

  std::vector<at::Tensor> trainable() const;
};

/// @param name  One of cases(). "checkpointing": each block is recomputed in backward. "lora": adapters of rank 8 on all
///              linear layers of the blocks, everything else frozen. Drawn from the default generator.
Subject make_subject(const std::string& name, const gpt::Config& config);

/// "plain" and what else a contender can do: see make_subject() and make_contender().
const std::vector<std::string>& cases();

} // namespace ebb::bench
