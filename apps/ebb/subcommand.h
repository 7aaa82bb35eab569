#pragma once

#include <CLI/CLI.hpp>

#include <functional>
#include <string>
#include <vector>

namespace ebb::app {

/// One word after `ebb`.
struct Subcommand {
  const char* name;
  const char* help;
  /// Declares the flags on `command` and returns what runs once they are parsed. Its result is the exit code; what it
  /// throws becomes a line on stderr and the code of ebb/base/error.h. `arguments` is the whole command line, program
  /// first.
  std::function<int()> (*declare)(CLI::App& command, const std::vector<std::string>& arguments);
};

/// All of them, in the order of --help (subcommands.cpp).
const std::vector<Subcommand>& subcommands();

std::function<int()> declare_train(CLI::App& command, const std::vector<std::string>& arguments);
std::function<int()> declare_doctor(CLI::App& command, const std::vector<std::string>& arguments);

} // namespace ebb::app
