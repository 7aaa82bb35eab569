#include "log_sink.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <array>
#include <cstdlib>
#include <memory>

namespace ebb::log::detail {
namespace {

constexpr std::array kLevels{
    spdlog::level::debug, spdlog::level::info, spdlog::level::warn, spdlog::level::err, spdlog::level::off};

spdlog::logger& logger() {
  static const auto instance = [] {
    auto created = std::make_shared<spdlog::logger>("ebb", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
    created->set_pattern("[%H:%M:%S.%e] %^[%l]%$ %v");
    const char* wanted = std::getenv("EBB_LOG");
    created->set_level(wanted ? spdlog::level::from_str(wanted) : spdlog::level::info);
    if (wanted && created->level() == spdlog::level::off && std::string_view(wanted) != "off") {
      created->set_level(spdlog::level::info);
      created->warn("EBB_LOG={} is not a level; use debug, info, warn, error or off. Using info.", wanted);
    }
    return created;
  }();
  return *instance;
}

} // namespace

bool sink_should_log(int level) {
  return logger().should_log(kLevels[level]);
}

void sink_set_level(int level) {
  logger().set_level(kLevels[level]);
}

void sink_write(int level, std::string_view line) {
  logger().log(kLevels[level], "{}", line);
}

} // namespace ebb::log::detail
