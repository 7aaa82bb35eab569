#include "ebb/train/event_file.h"

#include "crc32c.h"
#include "ebb/base/error.h"
#include "proto_writer.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace ebb::train {
namespace {

// Field numbers of the messages. Event:
constexpr int kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5;
// Summary and its Value:
constexpr int kValue = 1, kTag = 1, kSimpleValue = 2, kTensor = 8, kMetadata = 9;
// SummaryMetadata, its PluginData:
constexpr int kPluginData = 1, kPluginName = 1;
// TensorProto, its TensorShapeProto and Dim:
constexpr int kDtype = 1, kTensorShape = 2, kStringVal = 8, kDim = 2, kDimSize = 1;
constexpr std::uint64_t kDtString = 7;

double seconds_since_1970(const Clock& clock) {
  return std::chrono::duration<double>(clock.wall().time_since_epoch()).count();
}

ProtoWriter event_at(const Clock& clock, std::int64_t step) {
  ProtoWriter event;
  event.fixed(kWallTime, seconds_since_1970(clock)).varint(kStep, static_cast<std::uint64_t>(step));
  return event;
}

std::string_view raw(const auto& value) {
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}

std::uint32_t masked(std::uint32_t crc) {
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8;
}

} // namespace

EventFile::EventFile(const std::filesystem::path& directory, const Clock& clock) : clock_(clock) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  path_ = directory / ("events.out.tfevents." + std::to_string(static_cast<std::int64_t>(seconds_since_1970(clock))) +
                       "." + std::to_string(::getpid()) + ".ebb");
  out_.open(path_, std::ios::binary | std::ios::trunc);
  TORCH_CHECK_VALUE(
      out_.is_open(), "[EventFile] cannot write '", path_.string(),
      "': ", error ? error.message() : std::strerror(errno), "; give another run directory");
  write(ProtoWriter().fixed(kWallTime, seconds_since_1970(clock)).bytes(kFileVersion, "brain.Event:2").str());
  out_.flush();
}

bool EventFile::scalars(std::int64_t step, const std::map<std::string, double>& values) {
  ProtoWriter summary;
  for (const auto& [name, value] : values) {
    summary.message(kValue, ProtoWriter().bytes(kTag, name).fixed(kSimpleValue, static_cast<float>(value)));
  }
  write(event_at(clock_, step).message(kSummary, summary).str());
  return out_.flush().good();
}

bool EventFile::text(std::int64_t step, std::string_view name, std::string_view text) {
  const auto shape = ProtoWriter().message(kDim, ProtoWriter().varint(kDimSize, 1));
  const auto tensor = ProtoWriter().varint(kDtype, kDtString).message(kTensorShape, shape).bytes(kStringVal, text);
  const auto metadata = ProtoWriter().message(kPluginData, ProtoWriter().bytes(kPluginName, "text"));
  const auto value = ProtoWriter().bytes(kTag, name).message(kTensor, tensor).message(kMetadata, metadata);
  write(event_at(clock_, step).message(kSummary, ProtoWriter().message(kValue, value)).str());
  return out_.flush().good();
}

void EventFile::write(std::string_view event) {
  const std::uint64_t length = event.size();
  const std::uint32_t length_crc = masked(crc32c(raw(length)));
  const std::uint32_t event_crc = masked(crc32c(event));
  out_ << raw(length) << raw(length_crc) << event << raw(event_crc);
}

} // namespace ebb::train
