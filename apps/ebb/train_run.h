#pragma once

#include "train_options.h"

#include "ebb/comm/init.h"

namespace ebb::app {

/// Trains as one rank and writes the run's files. Collective.
/// @return The exit code.
int run_train(const TrainCommandOptions& options, bool trust_code, const comm::LaunchEnvironment& environment);

} // namespace ebb::app
