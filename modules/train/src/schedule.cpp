#include "ebb/train/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace ebb::train {

double learning_rate(const TrainOptions& options, std::int64_t step) {
  const auto warmup = std::min(options.warmup, options.steps);
  if (step < warmup) {
    return options.lr * static_cast<double>(step + 1) / static_cast<double>(warmup);
  }
  const auto last = std::max<std::int64_t>(1, options.steps - 1 - warmup);
  const auto progress = std::min(1.0, static_cast<double>(step - warmup) / static_cast<double>(last));
  const double lowest = options.lowest_lr();
  return lowest + 0.5 * (options.lr - lowest) * (1.0 + std::cos(std::numbers::pi * progress));
}

} // namespace ebb::train
