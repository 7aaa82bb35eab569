#pragma once

#include "ebb/base/options.h"

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ebb::train {

/// How a language model is trained. See Note [Options].
struct TrainOptions {
  std::int64_t steps = 1000;
  std::int64_t batch = 8;
  std::int64_t accumulate = 1;
  std::vector<std::string> batch_schedule = {}; ///< parse_batch_schedule() reads it.
  std::string optimizer = "adamw";
  double lr = 3e-4;
  std::optional<double> min_lr = {}; ///< lowest_lr() has the default.
  std::int64_t warmup = 100;
  std::array<double, 2> betas = {0.9, 0.95};
  double momentum = 0.9;
  double weight_decay = 0.1;
  double clip = 1.0;
  std::int64_t seed = 1;
  std::int64_t eval_every = 0;
  std::int64_t eval_batches = 50;
  std::int64_t sample_every = 0;
  std::int64_t sample_length = 400;
  double temperature = 0.8;
  std::int64_t top_k = 40;
  std::string prompt = "\n";

  /// The learning rate at the last step: min_lr, or a tenth of lr where it is not given.
  double lowest_lr() const {
    return min_lr.value_or(lr / 10);
  }

  /// Note [Options].
  template <class Visit>
  static void fields(Visit&& visit) {
    using O = TrainOptions;
    constexpr double kMost = 1e12; // of what is counted in steps; sums of them stay whole numbers
    visit("steps", &O::steps, "Optimizer steps.", between(1, kMost));
    visit("batch", &O::batch, "Sequences of one forward and backward on each rank.", between(1, 1'000'000));
    visit(
        "accumulate", &O::accumulate,
        "Forwards and backwards of a step; their gradients add up before they are reduced once.",
        between(1, 1'000'000));
    visit(
        "batch_schedule", &O::batch_schedule,
        "STEP:SAMPLES, several with spaces between: after STEP steps, global batches of SAMPLES sequences over all "
        "ranks, in micro-batches of at most batch. Before the first, ranks x batch x accumulate.",
        any_value());
    visit(
        "optimizer", &O::optimizer, "adamw, adam, sgd, rmsprop or adagrad.",
        any_value()); // names checked by make_optimizer
    visit("lr", &O::lr, "Peak learning rate.", above(0));
    visit(
        "min_lr", &O::min_lr, "Learning rate at the last step, where the cosine ends; a tenth of lr unless given.",
        at_least(0));
    visit("warmup", &O::warmup, "Steps over which the learning rate rises to its peak.", between(0, kMost));
    visit("betas", &O::betas, "Decay of the first and second moment (adamw, adam).", from_up_to(0, 1));
    visit("momentum", &O::momentum, "Momentum (sgd, rmsprop).", from_up_to(0, 1));
    visit("weight_decay", &O::weight_decay, "Weight decay of all parameters.", at_least(0));
    visit("clip", &O::clip, "Largest global L2 norm of the gradients; 0 does not clip.", at_least(0));
    visit("seed", &O::seed, "Of the initial parameters, the order of the data and the samples.", at_least(0));
    visit(
        "eval_every", &O::eval_every, "Steps between evaluations; 0 evaluates after the last step only.",
        between(0, kMost));
    visit(
        "eval_batches", &O::eval_batches,
        "Global batches an evaluation reads, spread over the validation text; 0 reads all.", between(0, 1'000'000'000));
    visit(
        "sample_every", &O::sample_every, "Steps between samples; 0 samples after the last step only.",
        between(0, kMost));
    visit("sample_length", &O::sample_length, "Bytes a sample has; 0 turns samples off.", between(0, 1'000'000));
    visit("temperature", &O::temperature, "Of sampling; 0 takes the likeliest byte.", at_least(0));
    visit("top_k", &O::top_k, "Sample among the k likeliest bytes; 0 among all.", between(0, 256));
    visit("prompt", &O::prompt, "What a sample goes on from; at least one byte.", not_empty());
  }
};

} // namespace ebb::train
