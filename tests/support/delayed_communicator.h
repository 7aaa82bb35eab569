#pragma once

#include "ebb/comm/communicator.h"

#include <memory>

namespace ebb::test {

/// `group`, where every call, and the wait for its end, takes up to `most_us` microseconds longer, another time each:
/// ranks drift apart as they do on real networks. Groups that Mesh splits off it as well.
std::shared_ptr<comm::Communicator> delayed(std::shared_ptr<comm::Communicator> group, int most_us);

/// What the environment variable EBB_TEST_DELAYS_US asks for; 0 without it.
int asked_delay_us();

} // namespace ebb::test
