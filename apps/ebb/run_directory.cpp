#include "run_directory.h"

#include <c10/util/Exception.h>

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

namespace ebb::app {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const char* what, const fs::path& path, int error) {
  TORCH_CHECK(
      error != ENOSPC && error != EDQUOT && error != EFBIG && error != EIO, "--run-dir: cannot ", what, " '",
      path.string(), "': ", std::strerror(error), "; make room on the disk and run again");
  TORCH_CHECK_VALUE(
      false, "--run-dir: cannot ", what, " '", path.string(), "': ", std::strerror(error),
      "; give another folder, or correct its permissions");
}

} // namespace

void check_run_directory(const fs::path& directory) {
  std::error_code error;
  fs::create_directories(directory, error);
  if (!error && !fs::is_directory(directory, error)) {
    error = error ? error : std::make_error_code(std::errc::not_a_directory);
  }
  if (error) {
    fail("make the folder", directory, error.value());
  }
  fs::directory_iterator(directory, error);
  if (error) {
    fail("read the folder", directory, error.value());
  }
  if (::access(directory.c_str(), W_OK | X_OK) != 0) {
    fail("write to the folder", directory, errno);
  }
  for (const char* name : {"config.toml", "summary.json"}) {
    if (fs::is_directory(directory / name, error)) {
      fail("write", directory / name, EISDIR);
    }
  }
}

void clear_run_directory(const fs::path& directory) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    const auto name = entry.path().filename().string();
    if (name == "summary.json" || (name.starts_with("events.out.tfevents.") && name.ends_with(".ebb"))) {
      std::error_code kept; // what cannot be removed is found when it is written
      fs::remove(entry.path(), kept);
    }
  }
  if (error) {
    fail("read the folder", directory, error.value());
  }
}

void write_run_file(const fs::path& directory, const std::string& name, const std::string& text) {
  const auto path = directory / name;
  errno = 0;
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  if (!out.is_open()) {
    fail("write", path, errno ? errno : EACCES);
  }
  out << text;
  out.close();
  if (!out.good()) {
    // The folder was usable when it was chosen.
    TORCH_CHECK(
        false, "--run-dir: cannot write all of '", path.string(), "': ", std::strerror(errno ? errno : EIO),
        "; make room on the disk and run again");
  }
}

} // namespace ebb::app
