#include "ebb/train/sampling.h"

#include "ebb/base/error.h"

#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>

namespace ebb::train {
namespace {

constexpr std::int64_t kNumBytes = 256;
constexpr std::int64_t kBytesBetweenStops = 32;

/// An index into `logits` drawn from softmax(logits / temperature) over the top k.
std::uint8_t draw(std::span<const float> model_logits, double temperature, std::int64_t top_k, Rng& rng) {
  std::array<float, kNumBytes> logits;
  std::transform(model_logits.begin(), model_logits.end(), logits.begin(), [](float logit) {
    return std::isnan(logit) ? -std::numeric_limits<float>::infinity() : logit; // else there is no order to sort by
  });
  std::array<std::uint8_t, kNumBytes> order;
  std::iota(order.begin(), order.end(), std::uint8_t{0});
  // Ties in index order, so that every rank draws the same.
  std::stable_sort(order.begin(), order.end(), [&](std::uint8_t a, std::uint8_t b) { return logits[a] > logits[b]; });
  if (temperature == 0) {
    return order[0];
  }
  const auto count = top_k == 0 ? kNumBytes : std::min(top_k, kNumBytes);
  std::array<double, kNumBytes> weights;
  double total = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    weights[i] = std::exp((logits[order[i]] - logits[order[0]]) / temperature);
    total += weights[i];
  }
  double rest = rng.uniform() * total;
  for (std::int64_t i = 0; i < count; ++i) {
    rest -= weights[i];
    if (rest < 0) {
      return order[i];
    }
  }
  return order[0]; // rounding, or a model that is not finite
}

} // namespace

std::string sample_text(
    const std::function<at::Tensor(const at::Tensor& tokens_BT)>& logits, const SampleOptions& options, Rng rng,
    c10::Device device) {
  TORCH_CHECK_VALUE(
      !options.prompt.empty(), "[sample_text] expected a prompt of at least one byte, got an empty one; use a newline");
  const at::NoGradGuard no_grad;
  std::string text = options.prompt;
  for (std::int64_t i = 0; i < options.length; ++i) {
    if (options.stop && i % kBytesBetweenStops == 0 && options.stop()) {
      break;
    }
    const auto seen = std::min<std::int64_t>(options.context, static_cast<std::int64_t>(text.size()));
    const auto tokens_BT = at::empty({1, seen}, at::kLong);
    std::transform(text.end() - seen, text.end(), tokens_BT.mutable_data_ptr<std::int64_t>(), [](char c) {
      return static_cast<std::uint8_t>(c);
    });
    const auto logits_BTV = logits(tokens_BT.to(device));
    TORCH_CHECK_VALUE(
        logits_BTV.dim() == 3 && logits_BTV.size(2) >= kNumBytes,
        "[sample_text] expected logits [1, T, V] with V at least 256 for bytes, got ", logits_BTV.sizes());
    const auto last_V = logits_BTV[0][seen - 1].narrow(0, 0, kNumBytes).to(at::kCPU, at::kFloat).contiguous();
    text += static_cast<char>(draw(
        {last_V.const_data_ptr<float>(), static_cast<std::size_t>(kNumBytes)}, options.temperature, options.top_k,
        rng));
  }
  return text.substr(options.prompt.size());
}

std::string printable(std::string_view text) {
  std::string result(text);
  for (auto& c : result) {
    if (c != '\n' && (c < ' ' || c > '~')) {
      c = '?';
    }
  }
  return result;
}

} // namespace ebb::train
