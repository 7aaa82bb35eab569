#pragma once

#include "train_options.h"

#include <string>

namespace ebb::app {

/// Sets the options that a TOML file names. Its keys are the names of the fields, all at the top level. Relative paths
/// of input files start at the file's folder.
/// @throws ValueError naming file and line: for text that is not TOML, an unknown key (with the nearest there is), a
///         value of the wrong type or out of bounds; and for a file that cannot be read or is larger than 1 MB.
void read_config_file(const std::string& path, TrainCommandOptions& options);

/// The options as a TOML file that read_config_file() reads back: what a run really used. Absent ones are left out.
std::string config_text(const TrainCommandOptions& options);

} // namespace ebb::app
