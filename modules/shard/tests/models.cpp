#include "models.h"

#include <mutex>

namespace ebb::shard::test {
namespace nn = torch::nn;

BlockImpl::BlockImpl(std::int64_t width, std::int64_t heads)
    : norm1(register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({width})))),
      norm2(register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({width})))),
      qkv(register_module("qkv", nn::Linear(width, 3 * width))),
      out(register_module("out", nn::Linear(width, width))),
      up(register_module("up", nn::Linear(width, 4 * width))),
      down(register_module("down", nn::Linear(4 * width, width))),
      heads(heads) {}

at::Tensor BlockImpl::forward(at::Tensor x) {
  const auto batch = x.size(0);
  const auto time = x.size(1);
  const auto width = x.size(2);
  const auto split = qkv(norm1(x)).view({batch, time, 3, heads, width / heads}).permute({2, 0, 3, 1, 4});
  const auto attended = at::scaled_dot_product_attention(split[0], split[1], split[2], {}, 0.0, /*is_causal=*/true);
  x = x + out(attended.transpose(1, 2).reshape({batch, time, width}));
  return x + down(at::gelu(up(norm2(x))));
}

GptImpl::GptImpl(
    std::int64_t vocabulary, std::int64_t context, std::int64_t width, std::int64_t heads, std::int64_t layers)
    : tokens(register_module("tokens", nn::Embedding(vocabulary, width))),
      positions(register_module("positions", nn::Embedding(context, width))),
      blocks(register_module("blocks", nn::ModuleList())),
      norm(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})))) {
  for (std::int64_t i = 0; i < layers; ++i) {
    blocks->push_back(Block(width, heads));
  }
}

at::Tensor GptImpl::forward(at::Tensor input) {
  auto x = tokens(input) + positions(at::arange(input.size(1)));
  for (const auto& block : *blocks) {
    x = block->as<Block>()->forward(x);
  }
  return nn::functional::linear(norm(x), tokens->weight);
}

OddMlpImpl::OddMlpImpl()
    : a(register_module("a", nn::Linear(7, 13))),
      b(register_module("b", nn::Linear(13, 5))),
      c(register_module("c", nn::Linear(5, 3))),
      temperature(register_parameter("temperature", at::ones({}))) {}

at::Tensor OddMlpImpl::forward(at::Tensor x) {
  return c(at::tanh(b(at::relu(a(x))))) * temperature;
}

namespace {

torch::jit::Module script_part(
    const std::string& name, const std::vector<std::pair<std::string, at::Tensor>>& parameters,
    const std::string& code) {
  torch::jit::Module part(name);
  for (const auto& [key, tensor] : parameters) {
    part.register_parameter(key, tensor.set_requires_grad(true), /*is_buffer=*/false);
  }
  part.define(code);
  return part;
}

at::Tensor small(at::IntArrayRef sizes) {
  return at::randn(sizes) * 0.2;
}

// Draws that depend on step and rank alone: ranks are threads and share LibTorch's default generator.
at::Generator generator_for(std::int64_t step, int rank) {
  return at::detail::createCPUGenerator(1000 * step + rank + 1);
}

at::Tensor joined(const std::function<at::Tensor(std::int64_t, int)>& batch, std::int64_t step, int num_ranks) {
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < num_ranks; ++rank) {
    parts.push_back(batch(step, rank));
  }
  return at::cat(parts);
}

} // namespace

torch::jit::Module make_script_model() {
  torch::jit::Module model("ScriptNet");
  model.register_module("linear", script_part("Linear", {{"weight", small({12, 6})}, {"bias", small({12})}}, R"(
def forward(self, x):
    return torch.relu(torch.linear(x, self.weight, self.bias))
)"));
  model.register_module(
      "lstm",
      script_part(
          "Lstm", {{"w_ih", small({36, 12})}, {"w_hh", small({36, 9})}, {"b_ih", small({36})}, {"b_hh", small({36})}},
          R"(
def forward(self, x):
    h = torch.zeros([1, x.size(1), 9], dtype=x.dtype)
    out, hn, cn = torch.lstm(x, [h, h], [self.w_ih, self.w_hh, self.b_ih, self.b_hh], True, 1, 0.0, True, False, False)
    return out
)"));
  model.register_module("conv", script_part("Conv", {{"weight", small({5, 9, 3})}, {"bias", small({5})}}, R"(
def forward(self, x):
    return torch.conv1d(x, self.weight, self.bias)
)"));
  auto norm = script_part("Norm", {{"weight", at::ones({5})}, {"bias", at::zeros({5})}}, "");
  norm.register_buffer("running_mean", at::zeros({5}));
  norm.register_buffer("running_var", at::ones({5}));
  norm.define(R"(
def forward(self, x):
    return torch.batch_norm(x, self.weight, self.bias, self.running_mean, self.running_var, True, 0.1, 1e-5, False)
)");
  model.register_module("norm", norm);
  model.define(R"(
def forward(self, x):
    y = self.lstm.forward(self.linear.forward(x))
    return self.norm.forward(self.conv.forward(y.permute([1, 2, 0])))
)");
  return model;
}

Subject make_subject(const std::string& kind, at::ScalarType dtype) {
  // Construction draws from the process-wide generator.
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(7);
  Subject subject;
  const auto named = [](torch::nn::Module& module) {
    std::vector<std::pair<std::string, at::Tensor>> all;
    for (const auto& parameter : module.named_parameters()) {
      all.emplace_back(parameter.key(), parameter.value());
    }
    return all;
  };
  if (kind == "gpt") {
    auto model = std::make_shared<Gpt>(31, 8, 16, 2, 3);
    (*model)->to(dtype);
    subject.module = model->get();
    const auto batch = [](std::int64_t step, int rank) {
      auto generator = generator_for(step, rank);
      return at::randint(31, {2, 9}, generator, at::kLong);
    };
    const auto loss_on = [model](const at::Tensor& tokens) {
      const auto logits = (*model)->forward(tokens.narrow(1, 0, 8));
      return at::cross_entropy_loss(logits.reshape({-1, 31}), tokens.narrow(1, 1, 8).reshape({-1}));
    };
    subject.loss = [=](std::int64_t step, int rank) { return loss_on(batch(step, rank)); };
    subject.full_loss = [=](std::int64_t step, int num_ranks) { return loss_on(joined(batch, step, num_ranks)); };
    subject.parameters = [model, named] { return named(**model); };
    subject.holds = model;
  } else if (kind == "mlp") {
    auto model = std::make_shared<OddMlp>();
    (*model)->to(dtype);
    subject.module = model->get();
    const auto batch = [dtype](std::int64_t step, int rank) {
      auto generator = generator_for(step, rank);
      return at::randn({4, 7}, generator, dtype);
    };
    const auto loss_on = [model](const at::Tensor& x) { return at::mse_loss((*model)->forward(x), x.narrow(1, 0, 3)); };
    subject.loss = [=](std::int64_t step, int rank) { return loss_on(batch(step, rank)); };
    subject.full_loss = [=](std::int64_t step, int num_ranks) { return loss_on(joined(batch, step, num_ranks)); };
    subject.parameters = [model, named] { return named(**model); };
    subject.holds = model;
  } else {
    TORCH_CHECK(kind == "script", kind);
    auto model = std::make_shared<torch::jit::Module>(make_script_model());
    subject.script = model.get();
    subject.loss = [model](std::int64_t step, int rank) {
      auto generator = generator_for(step, rank);
      const auto x = at::randn({7, 3, 6}, generator);
      return model->forward({x}).toTensor().pow(2).mean() + model->forward({x * 0.5}).toTensor().abs().mean();
    };
    subject.parameters = [model] {
      std::vector<std::pair<std::string, at::Tensor>> all;
      for (const auto& parameter : model->named_parameters()) {
        all.emplace_back(parameter.name, parameter.value);
      }
      return all;
    };
    subject.holds = model;
  }
  return subject;
}

Reference run_reference(const std::string& kind, int world_size, int steps, double clip, int replicas) {
  auto subject = make_subject(kind);
  std::vector<at::Tensor> parameters;
  for (const auto& [name, tensor] : subject.parameters()) {
    parameters.push_back(tensor);
  }
  torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
  Reference reference;
  for (int step = 0; step < steps; ++step) {
    std::vector<double> losses;
    std::vector<at::Tensor> sums(parameters.size());
    for (int rank = 0; rank < world_size; ++rank) {
      auto loss = subject.loss(step, rank);
      losses.push_back(loss.item<double>());
      loss.backward();
      if ((rank + 1) % (world_size / replicas) == 0) {
        for (std::size_t i = 0; i < parameters.size(); ++i) {
          auto& grad = parameters[i].mutable_grad();
          sums[i] = sums[i].defined() ? sums[i] + grad : grad;
          grad = at::Tensor();
        }
      }
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].mutable_grad() = sums[i];
    }
    std::vector<at::Tensor> grads;
    for (auto& parameter : parameters) {
      parameter.mutable_grad().div_(world_size);
    }
    if (clip > 0) {
      torch::nn::utils::clip_grad_norm_(parameters, clip);
    }
    for (auto& parameter : parameters) {
      grads.push_back(parameter.grad().clone());
    }
    optimizer.step();
    optimizer.zero_grad();
    reference.losses.push_back(losses);
    reference.grads.push_back(grads);
  }
  for (const auto& [name, tensor] : subject.parameters()) {
    reference.parameters.emplace_back(name, tensor.detach().clone());
  }
  return reference;
}

} // namespace ebb::shard::test
