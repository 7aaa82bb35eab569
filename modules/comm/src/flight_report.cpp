#include "flight_report.h"

#include "ebb/base/error.h"
#include "ebb/base/log.h"

#include "operation.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>

namespace ebb::comm {
namespace {

constexpr int kMostRecords = 65536;
constexpr std::size_t kLoggedRecords = 8;

using Row = std::array<std::string, 11>;

Row row_of(const CollectiveRecord& record, Clock::TimePoint now) {
  const bool ended = record.state != CollectiveRecord::State::kStarted;
  return {
      record.group,
      std::to_string(record.group_size),
      std::to_string(record.number),
      std::string(name_of(record.op)),
      record.unit.empty() ? "-" : record.unit,
      std::to_string(record.bytes),
      c10::toString(record.dtype),
      std::to_string(record.step),
      std::string(name_of(record.state)),
      fmt::format("{:.6f} s ago", seconds_between(record.started, now)),
      fmt::format("{:.6f} s{}", record.seconds, ended ? "" : " so far")};
}

/// A line a record, below one that names the columns.
std::vector<std::string> table_of(const std::vector<CollectiveRecord>& records, Clock::TimePoint now) {
  std::vector<Row> rows{
      {"group", "ranks", "number", "collective", "unit", "bytes", "dtype", "step", "state", "started", "took"}};
  for (const auto& record : records) {
    rows.push_back(row_of(record, now));
  }
  std::vector<std::string> lines(rows.size());
  for (std::size_t column = 0; column < rows[0].size(); ++column) {
    std::size_t width = 0;
    for (const auto& row : rows) {
      width = std::max(width, row[column].size());
    }
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const bool last = column + 1 == rows[0].size();
      lines[i] += last ? rows[i][column] : fmt::format("{:<{}}  ", rows[i][column], width);
    }
  }
  return lines;
}

std::string calendar_text(std::chrono::system_clock::time_point time) {
  const std::time_t seconds = std::chrono::system_clock::to_time_t(time);
  std::tm parts{};
  ::gmtime_r(&seconds, &parts);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S UTC", &parts);
  return text.data();
}

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "a host without a name";
}

/// @return  What went wrong; empty when all is written.
std::string write_file(const std::filesystem::path& path, const std::vector<std::string>& lines) {
  errno = 0;
  std::ofstream file(path, std::ios::trunc);
  for (const auto& line : lines) {
    file << line << '\n';
  }
  file.close();
  return file ? "" : errno != 0 ? std::generic_category().message(errno) : "it cannot be written";
}

} // namespace

FlightSettings flight_settings(const GetEnv& get_env) {
  FlightSettings settings;
  if (const char* text = get_env("EBB_FLIGHT_RECORDER"); text && *text) {
    const std::string_view view(text);
    const auto [end, error] = std::from_chars(view.data(), view.data() + view.size(), settings.capacity);
    TORCH_CHECK_VALUE(
        error == std::errc() && end == view.data() + view.size() && settings.capacity >= 0 &&
            settings.capacity <= kMostRecords,
        "[init] EBB_FLIGHT_RECORDER must be a whole number of collectives from 0 (off) to ", kMostRecords, ", got '",
        text, "'; correct or unset it");
  }
  if (const char* folder = get_env("EBB_FLIGHT_RECORDER_DIR"); folder && *folder && settings.capacity > 0) {
    std::error_code error;
    const auto path = std::filesystem::absolute(folder, error);
    if (!error) {
      std::filesystem::create_directories(path, error);
    }
    TORCH_CHECK_VALUE(
        !error && std::filesystem::is_directory(path, error) && ::access(path.c_str(), W_OK | X_OK) == 0,
        "[init] EBB_FLIGHT_RECORDER_DIR=", folder, " must be a folder that this rank may write to",
        error ? c10::str(", got: ", error.message()) : "", "; name one, or unset it");
    settings.folder = path.string();
  }
  return settings;
}

FlightSettings flight_settings() {
  return flight_settings([](const char* name) -> const char* { return std::getenv(name); });
}

FlightReport::FlightReport(int rank, int size, FlightSettings settings, const Clock& clock)
    : rank_(rank), size_(size), settings_(std::move(settings)), clock_(clock) {}

std::shared_ptr<FlightRing> FlightReport::add_group(std::string name, int size) {
  auto ring = std::make_shared<FlightRing>(std::move(name), size, settings_.capacity, clock_);
  const std::lock_guard lock(mutex_);
  std::erase_if(rings_, [](const auto& known) { return known.use_count() == 1; });
  rings_.push_back(ring);
  return ring;
}

std::vector<CollectiveRecord> FlightReport::all_records() {
  std::vector<CollectiveRecord> all;
  for (const auto& ring : rings_) {
    auto some = ring->records();
    std::move(some.begin(), some.end(), std::back_inserter(all));
  }
  std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.started < b.started; });
  return all;
}

void FlightReport::failed(const FlightRing& ring, std::uint64_t number, const std::exception& error) noexcept {
  if (failed_.exchange(true)) {
    return;
  }
  try {
    std::string what = "a collective that is not in the ring any more";
    for (const auto& record : ring.records()) {
      if (record.number == number) {
        what = describe({.op = record.op, .unit = record.unit, .step = record.step});
      }
    }
    const std::lock_guard lock(mutex_);
    write(
        c10::str("not finished: ", what, ", number ", number, " of group ", ring.group(), ": ", message_of(error)),
        log::Level::kError);
  } catch (...) {
    // The failure itself is what has to be seen.
  }
}

void FlightReport::leaving(const std::string& why) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    if (!failed_.load() && !settings_.folder.empty()) { // A failure tells more, and may be under way.
      write("left by itself: " + why, left_ ? log::Level::kDebug : log::Level::kInfo);
      left_ = true;
    }
  } catch (...) {
    // As above.
  }
}

void FlightReport::write(const std::string& last_line, log::Level level) {
  auto records = all_records();
  const auto now = clock_.now();
  if (!settings_.folder.empty()) {
    auto lines = table_of(records, now);
    lines.insert(
        lines.begin(), fmt::format(
                           "rank {} of {}, process {} on {}, {}: its last {} collectives, oldest first", rank_, size_,
                           ::getpid(), host_name(), calendar_text(clock_.wall()), records.size()));
    lines.push_back(last_line);
    const auto path = std::filesystem::path(settings_.folder) / fmt::format("rank{}.txt", rank_);
    const auto trouble = write_file(path, lines);
    if (trouble.empty()) {
      log::write(
          level, "flight recorder: the last {} collectives of rank {} are in {}", records.size(), rank_, path.string());
      return;
    }
    log::error("flight recorder: {} could not be written ({})", path.string(), trouble);
  }
  const auto count = std::min(records.size(), kLoggedRecords);
  log::error(
      "flight recorder: the last {} of {} collectives of rank {}, oldest first{}", count, records.size(), rank_,
      settings_.folder.empty() ? "; EBB_FLIGHT_RECORDER_DIR=FOLDER writes all to a file" : "");
  records.erase(records.begin(), records.end() - static_cast<std::ptrdiff_t>(count));
  for (const auto& line : table_of(records, now)) {
    log::error("  {}", line);
  }
  log::error("  {}", last_line);
}

} // namespace ebb::comm
