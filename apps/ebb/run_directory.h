#pragma once

#include <filesystem>
#include <string>

// The folder that a run leaves its files in. Errors here are the user's choice of folder (ValueError, "--run-dir: ...")
// or, where the disk is full or broken, a failure (c10::Error).
namespace ebb::app {

/// Makes the folder if it is missing, and finds out whether files can be listed, made and replaced in it.
void check_run_directory(const std::filesystem::path& directory);

/// A run directory holds one run: removes the summary and the events of an earlier one, and nothing else.
void clear_run_directory(const std::filesystem::path& directory);

/// Writes `text` as the whole content of the file directory/name.
void write_run_file(const std::filesystem::path& directory, const std::string& name, const std::string& text);

} // namespace ebb::app
