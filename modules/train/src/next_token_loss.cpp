#include "ebb/train/trainable_model.h"

#include <torch/torch.h>

namespace ebb::train {

at::Tensor next_token_loss(const at::Tensor& logits_BTV, const at::Tensor& targets_BT) {
  TORCH_CHECK_VALUE(
      logits_BTV.dim() == 3 && logits_BTV.size(0) == targets_BT.size(0) && logits_BTV.size(1) == targets_BT.size(1),
      "[next_token_loss] expected logits [", targets_BT.size(0), ", ", targets_BT.size(1), ", vocabulary], got ",
      logits_BTV.sizes(), "; the model must map int64 tokens [B, T] to logits [B, T, V]");
  return torch::nn::functional::cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten());
}

} // namespace ebb::train
