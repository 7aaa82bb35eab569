#pragma once

#include "train_options.h"

#include "ebb/comm/communicator.h"
#include "ebb/train/trainable_model.h"

#include <memory>
#include <string>

namespace ebb::app {

/// Fills in the sizes that the preset gives, so that the options state what the model is. A TorchScript model has no
/// sizes but its context, which is then that of the preset unless it was given.
/// @throws ValueError for sizes that do not fit together.
void resolve(ModelOptions& options);

/// Whether so many ranks can be arranged as the options say.
/// @throws ValueError that names the flag.
void check_parallel(const ParallelOptions& options, int world_size);

/// Whether the machine can hold one rank's part of the GPT that resolve()d options describe.
/// @throws ValueError naming both sizes.
void check_size(const ModelOptions& options, const ParallelOptions& parallel, int world_size);

/// Whether the TorchScript file, if there is one, can be loaded and wrapped as the options say. Loads it.
/// @throws What make_model() would.
void check_script(const ModelOptions& options, const ParallelOptions& parallel);

/// A model spread over the ranks of `world`.
struct SpreadModel {
  train::TrainableModel model;
  std::string description; ///< "GPT with 3 layers of 96, ..."
};

/// Makes the model, from a preset or a TorchScript file, from `seed`, and spreads it. Collective.
/// @throws ValueError for a TorchScript file without `trust_code`; FormatError when it is none.
SpreadModel make_model(
    const ModelOptions& model, const ParallelOptions& parallel, std::int64_t seed, bool trust_code,
    const std::shared_ptr<comm::Communicator>& world);

/// @throws ValueError when the options name a TorchScript file and the user did not say that its code may run.
void check_trust(const ModelOptions& options, bool trust_code);

} // namespace ebb::app
