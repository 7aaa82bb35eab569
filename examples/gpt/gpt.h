#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

/// A GPT (Radford et al. 2019: pre-norm decoder with learned positions) in plain torch::nn code. It knows nothing of
/// ebb; ebb shards it as it is.
///
/// Shape letters: B sequences, T positions, C = d_model, H heads, V vocabulary.
namespace gpt {

struct Config {
  std::int64_t vocab = 256; ///< Byte-level text needs 256.
  std::int64_t context = 64; ///< Longest sequence.
  std::int64_t d_model = 96;
  std::int64_t heads = 4; ///< Divides d_model.
  std::int64_t layers = 3;
};

/// Sizes by name; throws std::invalid_argument for any other name.
///   tiny   3 layers of 96, context 64, vocabulary 256: 0.4 M parameters.
///   26m    8 layers of 512, context 256, vocabulary 2048: 26.4 M.
///   124m   12 layers of 768, context 1024, vocabulary 50257: 124.4 M, GPT-2 small.
/// The larger two keep the vocabulary of the models they are named after, so that sizes and speeds compare.
Config preset(const std::string& name);
std::vector<std::string> preset_names();

struct BlockImpl : torch::nn::Module {
  BlockImpl(std::int64_t d_model, std::int64_t heads);
  torch::Tensor forward(torch::Tensor x_BTC);

  std::int64_t heads;
  torch::nn::LayerNorm norm1, norm2;
  torch::nn::Linear qkv, proj, up, down;
};
TORCH_MODULE(Block);

struct GPTImpl : torch::nn::Module {
  explicit GPTImpl(const Config& config);

  /// @param tokens_BT  int64, 0 <= token < vocab, T <= context.
  /// @return logits [B, T, V].
  torch::Tensor forward(torch::Tensor tokens_BT);

  Config config;
  torch::nn::Embedding tokens, positions; ///< `tokens` is the head as well: tied weights.
  std::vector<Block> blocks;
  /// How forward() runs a block; empty: it calls it. For activation checkpointing.
  std::function<torch::Tensor(Block& block, torch::Tensor x_BTC)> run_block;
  torch::nn::LayerNorm norm;
};
TORCH_MODULE(GPT);

} // namespace gpt
