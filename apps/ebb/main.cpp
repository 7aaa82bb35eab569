#include "subcommand.h"

#include "ebb/base/error.h"
#include "ebb/comm/init.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <iostream>
#include <new>

namespace {

using namespace ebb;

/// The error in one line, so that it survives a log of many ranks.
std::string one_line(std::string text) {
  while (!text.empty() && text.back() == '\n') {
    text.pop_back();
  }
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

/// What to print for `error`, with a remedy where its own text has none.
std::string explain(const std::exception& error) {
  auto text = one_line(message_of(error));
  if (dynamic_cast<const std::bad_alloc*>(&error) || text.find("DefaultCPUAllocator") != std::string::npos) {
    text = "not enough memory (" + text + "); use a smaller --batch, --context or model, or more ranks";
  }
  return text;
}

void complain(const std::string& text) {
  std::string rank;
  try {
    const auto environment = comm::launch_environment();
    rank = environment.world_size > 1 ? "rank " + std::to_string(environment.rank) + ": " : "";
  } catch (const std::exception&) { // then there is no rank to name
  }
  std::cerr << "ebb: " + rank + text << std::endl;
}

/// Whether something printed did not arrive, other than because its reader did not want more.
bool output_is_lost() {
  std::cout.flush();
  const bool written = std::fflush(stdout) == 0 && std::ferror(stdout) == 0 && std::cout.good();
  pollfd out{.fd = STDOUT_FILENO, .events = POLLOUT, .revents = 0};
  return !written && !(::poll(&out, 1, 0) == 1 && (out.revents & POLLERR) != 0);
}

/// What is wrong with the first word that is no flag; empty when it is a subcommand or there is none.
std::string unknown_subcommand(const std::vector<std::string>& arguments) {
  const auto word =
      std::find_if(arguments.begin() + 1, arguments.end(), [](const auto& text) { return !text.starts_with("-"); });
  std::string known;
  for (const auto& subcommand : app::subcommands()) {
    if (word == arguments.end() || *word == subcommand.name) {
      return {};
    }
    known += (known.empty() ? "" : ", ") + std::string(subcommand.name);
  }
  return "no subcommand '" + *word + "'; there are " + known;
}

int run(const std::vector<std::string>& arguments, std::vector<const char*> argv) {
  CLI::App app("ebb trains models that do not fit one machine, from C++.", "ebb");
  app.set_version_flag("--version", "ebb " EBB_VERSION);
  app.require_subcommand(1);
  app.fallthrough();
  app.footer(
      "Exit codes: 0 done, 1 failed or stopped unsaved, 2 wrong use, 3 bad data, 4 lost peer, 5 preempted and saved.");
  bool verbose = false;
  app.add_flag("--verbose", verbose, "With an error, show where in the code it arose.");

  std::function<int()> action;
  for (const auto& subcommand : app::subcommands()) {
    auto* command = app.add_subcommand(subcommand.name, subcommand.help);
    auto body = subcommand.declare(*command, arguments);
    command->callback([&action, body] { action = body; });
  }
  try {
    app.parse(static_cast<int>(argv.size()), argv.data());
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) { // --help, --version
      return app.exit(error);
    }
    const auto unknown = unknown_subcommand(arguments);
    const auto parsed = app.get_subcommands();
    complain(
        (unknown.empty() ? one_line(error.what()) : unknown) + "; see ebb " +
        (parsed.empty() ? "" : parsed.front()->get_name() + " ") + "--help");
    return static_cast<int>(ExitCode::kWrongUse);
  }
  try {
    return action();
  } catch (const std::exception& error) {
    complain(explain(error));
    if (verbose) {
      std::cerr << error.what() << std::endl;
    }
    return static_cast<int>(exit_code_of(error));
  }
}

} // namespace

int main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN); // Gloo writes to peers that may be gone.
  const int code = run({argv, argv + argc}, {argv, argv + argc});
  if (output_is_lost()) {
    complain("standard output could not be written and is incomplete; make room where it goes");
    return code == 0 ? static_cast<int>(ExitCode::kFailure) : code;
  }
  return code;
}
