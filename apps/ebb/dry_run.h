#pragma once

#include "train_options.h"

namespace ebb::app {

/// Prints what a step of rank 0 would compute, send and keep; trains nothing and starts no ranks.
/// @return An exit code.
int run_dry(const TrainCommandOptions& options, bool trust_code);

} // namespace ebb::app
