#pragma once

#include "ebb/train/train_options.h"

#include <cstdint>

namespace ebb::train {

/// The learning rate of one step: rises linearly over `warmup` steps, then falls along half a cosine to lowest_lr().
/// @param step  Steps done before this one; 0 for the first. Beyond the last step it stays there.
/// Source: Loshchilov and Hutter, SGDR, ICLR 2017, eq. (5) without restarts.
double learning_rate(const TrainOptions& options, std::int64_t step);

} // namespace ebb::train
