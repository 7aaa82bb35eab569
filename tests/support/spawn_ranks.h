#pragma once

#include "ebb/comm/init.h"

#include <functional>
#include <memory>

namespace ebb::test {

/// Runs `body` on `size` threads, each a rank of one Gloo group on loopback, and waits for all. A rank that throws
/// leaves the group, so that the others end too; the first error is rethrown here. A group of one needs no network.
void spawn_ranks(
    int size, const std::function<void(const std::shared_ptr<comm::Communicator>&)>& body,
    const comm::GroupOptions& options = {.timeout = std::chrono::seconds(60)});

/// The same, each rank with options of its own: ranks that differ in GroupOptions::host are on different hosts to ebb.
void spawn_ranks(
    int size, const std::function<void(const std::shared_ptr<comm::Communicator>&)>& body,
    const std::function<comm::GroupOptions(int rank)>& options_of);

} // namespace ebb::test
