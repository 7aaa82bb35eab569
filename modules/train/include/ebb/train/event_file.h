#pragma once

#include "ebb/base/clock.h"

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <string_view>

namespace ebb::train {

/// A file that TensorBoard reads: a TFRecord sequence of Event messages.
/// Source: tensorflow/core/util/event.proto, core/framework/summary.proto, and the record format of
/// core/lib/io/record_writer.cc.
class EventFile {
 public:
  /// Makes `directory` and in it a new file, `events.out.tfevents.TIME.PROCESS.ebb`.
  /// @throws ValueError when it cannot be written.
  explicit EventFile(const std::filesystem::path& directory, const Clock& clock = Clock::real());

  /// One point of the curve of each name.
  /// @return Whether everything so far could be written.
  bool scalars(std::int64_t step, const std::map<std::string, double>& values);
  /// One entry of the text tab.
  bool text(std::int64_t step, std::string_view name, std::string_view text);

  const std::filesystem::path& path() const {
    return path_;
  }

 private:
  void write(std::string_view event);

  const Clock& clock_;
  std::filesystem::path path_;
  std::ofstream out_;
};

} // namespace ebb::train
