#include "ebb/train/gradient_noise.h"

#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <utility>

namespace ebb::train {

GradientNoise::GradientNoise(double decay) : decay_(decay) {
  TORCH_CHECK_VALUE(decay >= 0 && decay < 1, "[GradientNoise] decay: expected a number in [0, 1), got ", decay);
}

bool GradientNoise::update(double small_squared_norm, double small_batch, double big_squared_norm, double big_batch) {
  TORCH_CHECK_VALUE(
      small_batch > 0 && small_batch < big_batch && std::isfinite(big_batch),
      "[GradientNoise] expected 0 < small batch < big batch, got ", small_batch, " and ", big_batch,
      "; one rank needs several micro-steps to have two batch sizes");
  if (!std::isfinite(small_squared_norm) || !std::isfinite(big_squared_norm)) {
    return false;
  }
  TORCH_CHECK_VALUE(
      small_squared_norm >= 0 && big_squared_norm >= 0, "[GradientNoise] expected squared norms of at least 0, got ",
      small_squared_norm, " and ", big_squared_norm);
  // Appendix A.1: E|G_b|^2 = |G|^2 + S / b, at two sizes b, solved for |G|^2 and S.
  const double squared_gradient =
      (big_batch * big_squared_norm - small_batch * small_squared_norm) / (big_batch - small_batch);
  const double noise = (small_squared_norm - big_squared_norm) / (1 / small_batch - 1 / big_batch);
  state_.squared_gradient = decay_ * state_.squared_gradient + (1 - decay_) * squared_gradient;
  state_.noise = decay_ * state_.noise + (1 - decay_) * noise;
  ++state_.updates;
  return true;
}

// Averages that begin at 0 are too small by 1 - decay^n: Kingma and Ba, Adam, 2015, section 3.
double GradientNoise::squared_gradient() const {
  return state_.squared_gradient / (1 - std::pow(decay_, static_cast<double>(state_.updates)));
}

double GradientNoise::noise() const {
  return state_.noise / (1 - std::pow(decay_, static_cast<double>(state_.updates)));
}

double GradientNoise::scale() const {
  if (state_.updates == 0) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  if (state_.noise <= 0) {
    return 0;
  }
  return state_.squared_gradient > 0 ? state_.noise / state_.squared_gradient : std::numeric_limits<double>::infinity();
}

void GradientNoise::load(const State& state) {
  TORCH_CHECK_VALUE(
      state.updates >= 0 && std::isfinite(state.squared_gradient) && std::isfinite(state.noise) &&
          (state.updates > 0 || (state.squared_gradient == 0 && state.noise == 0)),
      "[GradientNoise::load] expected the state of a GradientNoise, got averages ", state.squared_gradient, " and ",
      state.noise, " of ", state.updates, " updates");
  state_ = state;
}

struct LocalGradientNorm::Sum {
  at::Tensor squares; // one double, on the gradients' device, so that measuring does not wait for it
};

LocalGradientNorm::LocalGradientNorm() : sum_(std::make_shared<Sum>()) {}

shard::CommHook LocalGradientNorm::hook(shard::CommHook next) const {
  TORCH_CHECK_VALUE(next, "[LocalGradientNorm::hook] expected a hook that reduces, got an empty function");
  return [sum = sum_, next = std::move(next)](const shard::GradientReduction& reduction) {
    const at::NoGradGuard no_grad;
    const auto squares = at::linalg_vector_norm(reduction.input, 2, std::nullopt, false, at::kDouble).square();
    sum->squares = sum->squares.defined() ? sum->squares + squares : squares;
    return next(reduction);
  };
}

double LocalGradientNorm::take(std::int64_t reductions) {
  TORCH_CHECK_VALUE(reductions >= 1, "[LocalGradientNorm::take] expected at least 1 reduction, got ", reductions);
  TORCH_CHECK_VALUE(
      sum_->squares.defined(),
      "[LocalGradientNorm::take] no gradient was reduced since the last call; give hook() to fully_shard() as "
      "ShardOptions::comm_hook, and call this after a backward outside of no_sync()");
  // A micro-step's loss is divided by their number k: k^2 of its square, and 1/k for the mean.
  return std::exchange(sum_->squares, at::Tensor()).item<double>() * static_cast<double>(reductions);
}

} // namespace ebb::train
