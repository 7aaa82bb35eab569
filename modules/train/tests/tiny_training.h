#pragma once

#include "ebb/comm/init.h"
#include "ebb/train/train_job.h"
#include "support/temporary_folder.h"

#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace ebb::train::test {

/// A language model with everything that a paused job must remember: dropout, which draws from LibTorch's generator,
/// and batch normalisation, which keeps buffers.
struct TinyModelImpl : torch::nn::Module {
  TinyModelImpl(std::int64_t seed, double dropout_p) {
    torch::manual_seed(seed);
    embedding = register_module("embedding", torch::nn::Embedding(256, 6));
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
    dropout = register_module("dropout", torch::nn::Dropout(dropout_p));
    head = register_module("head", torch::nn::Linear(6, 256));
  }
  torch::Tensor forward(torch::Tensor tokens_BT) {
    auto x = norm(embedding(tokens_BT).flatten(0, 1)).view({tokens_BT.size(0), tokens_BT.size(1), 6});
    return head(dropout(torch::tanh(x)));
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Dropout dropout{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(TinyModel);

template <class Holder>
std::vector<Named> named_tensors(const torch::OrderedDict<std::string, Holder>& dict) {
  std::vector<Named> result;
  for (const auto& item : dict) {
    result.emplace_back(item.key(), item.value());
  }
  return result;
}

inline TrainableModel trainable(TinyModel model) {
  return {
      .loss = [model](const at::Tensor& x, const at::Tensor& y) mutable { return next_token_loss(model(x), y); },
      .logits = [model](const at::Tensor& x) mutable { return model(x); },
      .set_training = [model](bool training) mutable { model->train(training); },
      .parameters = local_parameters(named_tensors(model->named_parameters())),
      .buffers = named_tensors(model->named_buffers()),
      .attention_flops_per_token = 100,
  };
}

inline std::shared_ptr<const data::ByteCorpus> tiny_corpus(
    const ebb::test::TemporaryFolder& folder, double validation = 0.1) {
  std::string text;
  for (int i = 0; i < 120; ++i) {
    text += "number " + std::to_string(i * i) + ", ";
  }
  return std::make_shared<data::ByteCorpus>(data::ByteCorpusOptions{
      .files = {folder.write("tiny.txt", text)}, .context = 8, .validation_fraction = validation});
}

inline TrainOptions tiny_options() {
  return {
      .steps = 12,
      .batch = 4,
      .lr = 0.01,
      .min_lr = 0.001,
      .warmup = 3,
      .eval_every = 5,
      .eval_batches = 2,
      .sample_length = 5};
}

/// Everything a job told.
struct Recorder : Observer {
  void on_run_begin(const RunInfo& info) override {
    events.push_back(
        "begin " + std::to_string(info.planned_steps) + " steps, " + std::to_string(info.num_parameters) +
        " parameters");
  }
  void on_phase(Phase phase) override {
    events.push_back(phase == Phase::kOfflineTraining ? "offline training" : "another phase");
  }
  void on_step(const StepInfo& info) override {
    events.push_back("step " + std::to_string(info.step));
    steps.push_back(info);
  }
  void on_metrics(std::int64_t step, const std::map<std::string, double>& metrics) override {
    events.push_back("metrics " + std::to_string(step));
    evaluations.push_back(metrics.at("eval/loss"));
  }
  void on_text(std::int64_t step, const std::string& name, const std::string& text) override {
    events.push_back(name + " " + std::to_string(step));
    texts.push_back(text);
  }
  void on_run_end(const std::string& why) override {
    events.push_back("end: " + why);
  }
  std::vector<double> losses() const {
    std::vector<double> result;
    for (const auto& step : steps) {
      result.push_back(step.metrics.at("loss"));
    }
    return result;
  }
  std::vector<std::string> events;
  std::vector<StepInfo> steps;
  std::vector<double> evaluations;
  std::vector<std::string> texts;
};

/// One job with its model and what it told.
struct TrainingRun {
  TrainingRun(
      std::shared_ptr<const data::ByteCorpus> corpus, TrainOptions options, std::int64_t model_seed = 1,
      double dropout = 0.5, std::shared_ptr<comm::Communicator> world = comm::single(),
      const Clock& clock = Clock::real())
      : model(model_seed, dropout), recorder(std::make_shared<Recorder>()) {
    torch::manual_seed(5); // the dropout of every run starts alike
    job = std::make_unique<TrainJob>(TrainSetup{
        .model = trainable(model),
        .corpus = std::move(corpus),
        .world = std::move(world),
        .options = std::move(options),
        .observers = {recorder},
        .clock = &clock});
  }
  TinyModel model;
  std::shared_ptr<Recorder> recorder;
  std::unique_ptr<TrainJob> job;
};

inline bool bit_equal(const TinyModel& a, const TinyModel& b) {
  const auto equal = [](const std::vector<Named>& x, const std::vector<Named>& y) {
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (!x[i].second.equal(y[i].second)) {
        return false;
      }
    }
    return x.size() == y.size();
  };
  return equal(named_tensors(a->named_parameters()), named_tensors(b->named_parameters())) &&
         equal(named_tensors(a->named_buffers()), named_tensors(b->named_buffers()));
}

} // namespace ebb::train::test
