#pragma once

#include "ebb/train/parameter_set.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace ebb::train {

/// A model as the trainer sees it: functions over it, so that any model can be trained.
/// Legend: B sequences, T tokens, V vocabulary (at least 256 for bytes).
struct TrainableModel {
  /// Mean loss, a scalar, for int64 tokens and targets [B, T].
  std::function<at::Tensor(const at::Tensor& tokens_BT, const at::Tensor& targets_BT)> loss;
  /// Logits [B, T, V], for samples. Empty: the model cannot be sampled from.
  std::function<at::Tensor(const at::Tensor& tokens_BT)> logits;
  /// Switches dropout and the like between training and evaluation. Empty: nothing to switch.
  std::function<void(bool training)> set_training;
  std::shared_ptr<ParameterSet> parameters;
  /// What the model keeps besides parameters (running means, ...); part of a paused job's state.
  std::vector<Named> buffers;
  /// Operations of attention's two matrix products, forward and backward, for one token: 12 x layers x context x
  /// d_model; 0 when not known. See Note [Model flops].
  double attention_flops_per_token = 0;
};

// Note [Model flops] Operations counted for one token: 6 N for N parameters (2 in forward, 4 in backward, each
// multiplication and addition one), plus 12 L T C for the attention scores and their use in L layers over T positions
// of width C, as if attention were not causal: Chowdhery et al., PaLM, 2022, appendix B. Recomputation is not counted.
// So TFLOPS here are model FLOPS, and compare between implementations.

/// Mean cross entropy of targets [B, T] under logits [B, T, V], in nats a token.
at::Tensor next_token_loss(const at::Tensor& logits_BTV, const at::Tensor& targets_BT);

} // namespace ebb::train
