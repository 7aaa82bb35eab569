#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

namespace ebb::bench {

/// One step of AdamW on `parameters`, each call. The hyperparameters are peers.py's.
/// @param kind  "stock": torch::optim::AdamW; "fused": ebb's, on the kernel behind Python's AdamW(fused=True).
std::function<void()> make_adamw(const std::string& kind, std::vector<at::Tensor> parameters);

} // namespace ebb::bench
