#pragma once

#include "flight_report.h"

#include <memory>

namespace ebb::comm {

/// `group`, its collectives and those of the groups split off it kept by a flight recorder; `group` itself where the
/// settings turn that off. Whatever the backend: it sees nothing of this.
/// @param clock  Must outlive the group and its Works.
std::shared_ptr<Communicator> record(
    std::shared_ptr<Communicator> group, const FlightSettings& settings, const Clock& clock = Clock::real());

} // namespace ebb::comm
