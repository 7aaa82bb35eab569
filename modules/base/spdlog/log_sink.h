#pragma once

#include <string_view>

// All that the rest of base sees of spdlog. Levels: 0 debug, 1 info, 2 warn, 3 error, 4 off.
namespace ebb::log::detail {

bool sink_should_log(int level);
void sink_set_level(int level);
void sink_write(int level, std::string_view line);

} // namespace ebb::log::detail
