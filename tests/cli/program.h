#pragma once

#include "support/temporary_folder.h"

#include <nlohmann/json.hpp>

#include <sys/types.h>

#include <filesystem>
#include <string>
#include <vector>

namespace ebb::test {

/// What a program left behind.
struct Outcome {
  int code = -1; ///< Exit code, 128 + n after signal n; -1 when it had to be killed after the limit.
  std::string out;
  std::string err;
};

/// The ebb program, running. Killed at the end of the test if it still does.
class Ebb {
 public:
  /// Starts `ebb arguments...`; its output goes to files in `folder`, standard output to `out` where that is given.
  Ebb(const TemporaryFolder& folder, const std::vector<std::string>& arguments, const std::filesystem::path& out = {});
  ~Ebb();
  Ebb(const Ebb&) = delete;
  Ebb& operator=(const Ebb&) = delete;

  void signal(int signal) const;
  /// Kills (SIGKILL) one of the ranks that it has started.
  void kill_child() const;
  /// Waits until `path` exists and has something in it, 60 s at most.
  static bool wait_for_file(const std::filesystem::path& path);
  /// Waits for the end, 120 s at most.
  Outcome wait();

 private:
  std::filesystem::path out_;
  std::filesystem::path err_;
  pid_t pid_ = -1;
};

/// Runs `ebb arguments...` to its end.
Outcome run_ebb(const TemporaryFolder& folder, const std::vector<std::string>& arguments);

std::string read_file(const std::filesystem::path& path);
nlohmann::json read_json(const std::filesystem::path& path);

/// A text of 18 kB for tiny trainings, as a file in `folder`.
std::string write_text(const TemporaryFolder& folder, const std::string& name = "text.txt");

/// `ebb train` of a model so small that a step takes a millisecond; `more` is appended.
std::vector<std::string> tiny_training(
    const std::string& data, const std::string& run_dir, const std::vector<std::string>& more = {});

} // namespace ebb::test
