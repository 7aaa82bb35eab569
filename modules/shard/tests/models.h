#pragma once

#include <torch/script.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace ebb::shard::test {

/// A transformer block as one writes it in LibTorch: nothing in it knows of ebb.
struct BlockImpl : torch::nn::Module {
  BlockImpl(std::int64_t width, std::int64_t heads);
  at::Tensor forward(at::Tensor x);
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
  std::int64_t heads;
};
TORCH_MODULE(Block);

/// Embedding tied to the head, positions, blocks, norm.
struct GptImpl : torch::nn::Module {
  GptImpl(std::int64_t vocabulary, std::int64_t context, std::int64_t width, std::int64_t heads, std::int64_t layers);
  at::Tensor forward(at::Tensor tokens);
  torch::nn::Embedding tokens{nullptr}, positions{nullptr};
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Gpt);

/// Layers of 7, 13, 5, 3 and a scalar temperature: nothing divides by 2, 3 or 4.
struct OddMlpImpl : torch::nn::Module {
  OddMlpImpl();
  at::Tensor forward(at::Tensor x);
  torch::nn::Linear a{nullptr}, b{nullptr}, c{nullptr};
  at::Tensor temperature;
};
TORCH_MODULE(OddMlp);

/// A TorchScript model of Linear, LSTM, Conv1d and BatchNorm1d, each a submodule.
torch::jit::Module make_script_model();

/// One model under test, whichever way it was written.
struct Subject {
  std::function<at::Tensor(std::int64_t step, int rank)> loss; ///< On the batch of this step and rank.
  std::function<at::Tensor(std::int64_t step, int num_ranks)>
      full_loss; ///< On all ranks' batches as one; not "script".
  std::function<std::vector<std::pair<std::string, at::Tensor>>()> parameters;
  torch::nn::Module* module = nullptr; ///< One of the two.
  torch::jit::Module* script = nullptr;
  std::shared_ptr<void> holds;
};

/// "gpt", "mlp" or "script", always with the same initial values. `dtype`: the models compute in it.
Subject make_subject(const std::string& kind, at::ScalarType dtype = at::kFloat);

/// What one unsharded process computes: the micro-batches of `world_size` ranks in rank order, gradients summed in that
/// order and divided once, `steps` AdamW steps.
struct Reference {
  std::vector<std::vector<double>> losses; ///< [step][rank]
  std::vector<std::vector<at::Tensor>> grads; ///< [step][parameter]
  std::vector<std::pair<std::string, at::Tensor>> parameters; ///< At the end.
};
/// `replicas`: the sums of that many consecutive groups of ranks are taken first, then their sum, as hybrid sharding does.
Reference run_reference(const std::string& kind, int world_size, int steps, double clip = 0, int replicas = 1);

} // namespace ebb::shard::test
