#include "gpt/gpt.h"

#include <cmath>
#include <stdexcept>

namespace gpt {
namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;

struct Preset {
  const char* name;
  Config config;
};

const Preset kPresets[] = {
    {"tiny", {.vocab = 256, .context = 64, .d_model = 96, .heads = 4, .layers = 3}},
    {"26m", {.vocab = 2048, .context = 256, .d_model = 512, .heads = 8, .layers = 8}},
    {"124m", {.vocab = 50257, .context = 1024, .d_model = 768, .heads = 12, .layers = 12}},
};

const Config& checked(const Config& config) {
  TORCH_CHECK_VALUE(
      config.vocab > 0 && config.context > 0 && config.d_model > 0 && config.heads > 0 && config.layers > 0,
      "[GPT] sizes must be positive, got vocab ", config.vocab, ", context ", config.context, ", d_model ",
      config.d_model, ", heads ", config.heads, ", layers ", config.layers);
  TORCH_CHECK_VALUE(
      config.d_model % config.heads == 0, "[GPT] d_model must be a multiple of heads, got ", config.d_model, " and ",
      config.heads);
  return config;
}

} // namespace

Config preset(const std::string& name) {
  std::string known;
  for (const auto& preset : kPresets) {
    if (name == preset.name) {
      return preset.config;
    }
    known += (known.empty() ? "" : ", ") + std::string(preset.name);
  }
  throw std::invalid_argument("[gpt::preset] no preset '" + name + "'; there are " + known);
}

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const auto& preset : kPresets) {
    names.emplace_back(preset.name);
  }
  return names;
}

BlockImpl::BlockImpl(std::int64_t d_model, std::int64_t heads)
    : heads(heads),
      norm1(register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({d_model})))),
      norm2(register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({d_model})))),
      qkv(register_module("qkv", nn::Linear(d_model, 3 * d_model))),
      proj(register_module("proj", nn::Linear(d_model, d_model))),
      up(register_module("up", nn::Linear(d_model, 4 * d_model))),
      down(register_module("down", nn::Linear(4 * d_model, d_model))) {}

torch::Tensor BlockImpl::forward(torch::Tensor x_BTC) {
  const auto B = x_BTC.size(0), T = x_BTC.size(1), C = x_BTC.size(2);
  const auto split = qkv(norm1(x_BTC)).view({B, T, 3, heads, C / heads}).permute({2, 0, 3, 1, 4}).unbind(0);
  auto y_BTC = at::scaled_dot_product_attention(
      split[0], split[1], split[2], /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true);
  y_BTC = y_BTC.transpose(1, 2).reshape({B, T, C});
  x_BTC = x_BTC + proj(y_BTC);
  return x_BTC + down(torch::gelu(up(norm2(x_BTC))));
}

GPTImpl::GPTImpl(const Config& config)
    : config(checked(config)),
      tokens(register_module("tokens", nn::Embedding(config.vocab, config.d_model))),
      positions(register_module("positions", nn::Embedding(config.context, config.d_model))),
      norm(nullptr) {
  for (std::int64_t layer = 0; layer < config.layers; ++layer) {
    blocks.push_back(register_module("block" + std::to_string(layer), Block(config.d_model, config.heads)));
  }
  norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({config.d_model})));

  // GPT-2's start: small normal weights, and the two projections that write to the residual stream smaller still, so
  // that its variance does not grow with depth.
  const double residual = 0.02 / std::sqrt(2.0 * static_cast<double>(config.layers));
  nn::init::normal_(tokens->weight, 0.0, 0.02);
  nn::init::normal_(positions->weight, 0.0, 0.02);
  for (auto& block : blocks) {
    for (auto& [linear, std] :
         {std::pair{block->qkv, 0.02}, {block->proj, residual}, {block->up, 0.02}, {block->down, residual}}) {
      nn::init::normal_(linear->weight, 0.0, std);
      nn::init::zeros_(linear->bias);
    }
  }
}

torch::Tensor GPTImpl::forward(torch::Tensor tokens_BT) {
  const auto T = tokens_BT.size(1);
  TORCH_CHECK_VALUE(T <= config.context, "[GPT] a sequence may have at most ", config.context, " tokens, got ", T);
  auto x_BTC = tokens(tokens_BT) + positions(torch::arange(T, tokens_BT.options()));
  for (auto& block : blocks) {
    x_BTC = run_block ? run_block(block, x_BTC) : block(x_BTC);
  }
  return F::linear(norm(x_BTC), tokens->weight);
}

} // namespace gpt
