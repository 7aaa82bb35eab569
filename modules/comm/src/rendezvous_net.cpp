#include "rendezvous_net.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>

namespace ebb::comm {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

AddressList resolve(const std::string& host, int port, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
    found = nullptr;
  }
  return {found, &::freeaddrinfo};
}

socklen_t length_of(const sockaddr* address) {
  return address->sa_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
}

std::string numeric(const sockaddr* address) {
  std::array<char, NI_MAXHOST> text{};
  if (::getnameinfo(address, length_of(address), text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) != 0) {
    return "";
  }
  return text.data();
}

class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() {
    if (fd_ >= 0) {
      ::close(fd_);
    }
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int get() const {
    return fd_;
  }
  int release() {
    return std::exchange(fd_, -1);
  }

 private:
  int fd_;
};

bool answers(const addrinfo* address, int timeout_ms) {
  const Socket socket(::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (socket.get() < 0) {
    return false;
  }
  if (::connect(socket.get(), address->ai_addr, address->ai_addrlen) == 0) {
    return true;
  }
  pollfd waiting{.fd = socket.get(), .events = POLLOUT, .revents = 0};
  if (errno != EINPROGRESS || ::poll(&waiting, 1, timeout_ms) != 1) {
    return false;
  }
  int error = 0;
  socklen_t size = sizeof(error);
  return ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0;
}

} // namespace

std::vector<std::string> addresses_of(const std::string& host) {
  std::vector<std::string> addresses;
  const auto list = resolve(host, 0, 0);
  for (const addrinfo* item = list.get(); item; item = item->ai_next) {
    auto text = numeric(item->ai_addr);
    if (!text.empty() && std::find(addresses.begin(), addresses.end(), text) == addresses.end()) {
      addresses.push_back(std::move(text));
    }
  }
  return addresses;
}

std::string address_of_interface(const std::string& name) {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) {
    return "";
  }
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(all, &::freeifaddrs);
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* item = all; item; item = item->ifa_next) {
      if (item->ifa_addr && item->ifa_addr->sa_family == family && name == item->ifa_name) {
        return numeric(item->ifa_addr);
      }
    }
  }
  return "";
}

std::string own_address_towards(const std::string& host) {
  const auto list = resolve(host, 9, 0);
  for (const addrinfo* item = list.get(); item; item = item->ai_next) {
    // Connecting a datagram socket only chooses the route.
    const Socket socket(::socket(item->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_storage own{};
    socklen_t size = sizeof(own);
    if (socket.get() >= 0 && ::connect(socket.get(), item->ai_addr, item->ai_addrlen) == 0 &&
        ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &size) == 0) {
      return numeric(reinterpret_cast<sockaddr*>(&own));
    }
  }
  return "";
}

Listener listen_on(const std::string& address, int port) {
  const auto list = resolve(address, port, AI_NUMERICHOST | AI_PASSIVE);
  if (!list) {
    errno = EADDRNOTAVAIL;
    return {};
  }
  Socket socket(::socket(list->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  if (socket.get() < 0 || ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
      ::bind(socket.get(), list->ai_addr, list->ai_addrlen) != 0 || ::listen(socket.get(), SOMAXCONN) != 0 ||
      ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&bound), &size) != 0) {
    const int error = errno;
    ::close(socket.release());
    errno = error;
    return {};
  }
  const auto network_port = bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                                        : reinterpret_cast<sockaddr_in*>(&bound)->sin_port;
  return {socket.release(), ntohs(network_port)};
}

std::string wait_for_server(const std::string& host, int port, Clock::TimePoint deadline) {
  using namespace std::chrono_literals;
  for (auto pause = 10ms;; pause = std::min(2 * pause, 500ms)) {
    const auto list = resolve(host, port, 0);
    for (const addrinfo* item = list.get(); item; item = item->ai_next) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
      if (answers(item, static_cast<int>(std::clamp<std::int64_t>(left.count(), 1, 3000)))) {
        return numeric(item->ai_addr);
      }
    }
    if (std::chrono::steady_clock::now() + pause > deadline) {
      return "";
    }
    std::this_thread::sleep_for(pause);
  }
}

} // namespace ebb::comm
