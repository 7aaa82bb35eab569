#pragma once

#include "ebb/base/rng.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace ebb::train {

/// How sample_text() draws.
struct SampleOptions {
  std::int64_t length = 400; ///< Bytes.
  std::int64_t context = 64; ///< The model sees at most this many bytes.
  double temperature = 0.8; ///< 0 takes the likeliest byte.
  std::int64_t top_k = 40; ///< Sample among the k likeliest bytes; 0 among all.
  std::string prompt = "\n"; ///< At least one byte; not part of the result.
  /// Asked now and then; true ends the text early. Must answer the same on all ranks.
  std::function<bool()> stop = {};
};

/// Text that a byte-level model writes after the prompt, one forward a byte, without gradients. Logits beyond byte 255
/// are not sampled. Collective where the model's forward is; every rank needs an equal `rng` and then gets the same
/// text.
/// @param logits  int64 tokens [1, T] to logits [1, T, V], V >= 256, on the CPU or the tokens' device.
std::string sample_text(
    const std::function<at::Tensor(const at::Tensor& tokens_BT)>& logits, const SampleOptions& options, Rng rng,
    c10::Device device);

/// `text` with every byte that is neither printable ASCII nor a newline replaced by '?': a model may write anything,
/// also what a terminal would obey.
std::string printable(std::string_view text);

} // namespace ebb::train
