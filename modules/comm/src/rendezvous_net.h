#pragma once

#include "ebb/base/clock.h"

#include <string>
#include <vector>

namespace ebb::comm {

/// The numeric addresses of `host`, the resolver's favourite first; none when it does not know the host.
std::vector<std::string> addresses_of(const std::string& host);

/// The first numeric address of a network interface, IPv4 before IPv6; empty when there is no such interface or it has
/// none.
std::string address_of_interface(const std::string& name);

/// This host's own address on the way to `host` (numeric); empty when there is no way. Sends nothing.
std::string own_address_towards(const std::string& host);

/// A socket that listens on one numeric address, and its port.
struct Listener {
  int fd = -1;
  int port = 0;
};

/// @param port  0: any free one.
/// @return      fd -1 and errno when the address is not this host's or the port is taken.
Listener listen_on(const std::string& address, int port);

/// Tries to connect to `host` until that works or `deadline` passes.
/// @return  The numeric address that answered; empty after the deadline.
std::string wait_for_server(const std::string& host, int port, Clock::TimePoint deadline);

} // namespace ebb::comm
