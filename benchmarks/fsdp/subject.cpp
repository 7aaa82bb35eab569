#include "fsdp/subject.h"

#include "ebb/shard/checkpoint.h"

#include <torch/torch.h>

#include <array>

namespace ebb::bench {
namespace {

namespace F = torch::nn::functional;

constexpr std::int64_t kLoraRank = 8;

using BlockForward = std::function<at::Tensor(std::size_t block, const at::Tensor& x_BTC)>;

/// gpt::GPTImpl::forward() with another way through the blocks.
at::Tensor logits_by(gpt::GPTImpl& model, const at::Tensor& tokens_BT, const BlockForward& block_forward) {
  auto x_BTC = model.tokens(tokens_BT) + model.positions(torch::arange(tokens_BT.size(1), tokens_BT.options()));
  for (std::size_t i = 0; i < model.blocks.size(); ++i) {
    x_BTC = block_forward(i, x_BTC);
  }
  return F::linear(model.norm(x_BTC), model.tokens->weight);
}

struct Adapter {
  at::Tensor a; ///< [rank, in]
  at::Tensor b; ///< [out, rank], zero at first.
};
using Adapters = std::array<Adapter, 4>; // Of a block's qkv, proj, up and down.

std::array<torch::nn::Linear, 4> linears_of(gpt::Block& block) {
  return {block->qkv, block->proj, block->up, block->down};
}

/// Registers them with the block, so that they belong to its unit.
Adapters add_adapters(gpt::Block& block) {
  static constexpr std::array kNames{"qkv", "proj", "up", "down"};
  Adapters adapters;
  const auto linears = linears_of(block);
  for (std::size_t i = 0; i < adapters.size(); ++i) {
    const auto& weight = linears[i]->weight;
    const std::string name = kNames[i];
    adapters[i].a = block->register_parameter(name + "_a", at::empty({kLoraRank, weight.size(1)}).normal_(0.0, 0.02));
    adapters[i].b = block->register_parameter(name + "_b", at::zeros({weight.size(0), kLoraRank}));
  }
  return adapters;
}

/// gpt::BlockImpl::forward() with adapters.
at::Tensor adapted_forward(gpt::BlockImpl& block, const Adapters& adapters, const at::Tensor& x_BTC) {
  const auto apply = [&](torch::nn::Linear& linear, const Adapter& adapter, const at::Tensor& x) {
    return linear(x) + F::linear(F::linear(x, adapter.a), adapter.b);
  };
  const auto B = x_BTC.size(0), T = x_BTC.size(1), C = x_BTC.size(2);
  const auto split = apply(block.qkv, adapters[0], block.norm1(x_BTC))
                         .view({B, T, 3, block.heads, C / block.heads})
                         .permute({2, 0, 3, 1, 4})
                         .unbind(0);
  auto y_BTC = at::scaled_dot_product_attention(
      split[0], split[1], split[2], /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true);
  y_BTC = y_BTC.transpose(1, 2).reshape({B, T, C});
  const auto middle_BTC = x_BTC + apply(block.proj, adapters[1], y_BTC);
  const auto up = torch::gelu(apply(block.up, adapters[2], block.norm2(middle_BTC)));
  return middle_BTC + apply(block.down, adapters[3], up);
}

Subject with_adapters(gpt::GPT model) {
  for (auto& parameter : model->parameters()) {
    parameter.requires_grad_(false);
  }
  std::vector<Adapters> adapters;
  for (auto& block : model->blocks) {
    adapters.push_back(add_adapters(block));
  }
  return {model.ptr(), [model, adapters](const at::Tensor& tokens_BT) mutable {
            return logits_by(*model, tokens_BT, [&](std::size_t i, const at::Tensor& x) {
              return adapted_forward(*model->blocks[i], adapters[i], x);
            });
          }};
}

Subject with_checkpoints(gpt::GPT model) {
  return {model.ptr(), [model](const at::Tensor& tokens_BT) mutable {
            return logits_by(*model, tokens_BT, [&](std::size_t i, const at::Tensor& x) {
              return checkpoint(
                  [block = model->blocks[i]](const at::Tensor& in) mutable { return block->forward(in); }, x);
            });
          }};
}

} // namespace

std::vector<at::Tensor> Subject::trainable() const {
  std::vector<at::Tensor> found;
  for (const auto& parameter : module->parameters()) {
    if (parameter.requires_grad()) {
      found.push_back(parameter);
    }
  }
  return found;
}

const std::vector<std::string>& cases() {
  static const std::vector<std::string> names{"plain", "bf16", "checkpointing", "offload", "lora"};
  return names;
}

Subject make_subject(const std::string& name, const gpt::Config& config) {
  gpt::GPT model(config);
  if (name == "lora") {
    return with_adapters(model);
  }
  if (name == "checkpointing") {
    return with_checkpoints(model);
  }
  return {model.ptr(), [model](const at::Tensor& tokens_BT) mutable { return model(tokens_BT); }};
}

} // namespace ebb::bench
