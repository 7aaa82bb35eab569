#include "socket_transport.h"

#include <c10/util/ScopeExit.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <set>

namespace ebb::comm {
namespace {

using namespace std::chrono_literals;

// Note [Which sockets are a group's]
// Gloo offers no way out of a stuck collective: only shutdown(2) on its sockets ends it. Which file descriptors these
// are is told by addresses. A Gloo device listens on one address and all its pairs share it, so a connection belongs to
// this group when its local address is our device's, or its remote address is a peer's device's. (With ranks as threads
// of one process this finds the sockets of all of the group's ranks here; a group with one rank gone is of no use to the
// others either.) The descriptors are duplicated, so that a number that Gloo closed and the system gave out again cannot
// be shut by mistake; the duplicates are closed with the group.

constexpr auto kFormingTimeout = 3s; // Gloo multiplies it by five where a peer dies while forming.
constexpr std::chrono::milliseconds kRunningTimeout = 24h; // Timeouts are Liveness's business.

std::string address_text(const sockaddr_storage& address) {
  char text[INET6_ADDRSTRLEN] = "";
  int port = 0;
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    inet_ntop(AF_INET, &v4.sin_addr, text, sizeof(text));
    port = ntohs(v4.sin_port);
  } else if (address.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
    inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof(text));
    port = ntohs(v6.sin6_port);
  } else {
    return "";
  }
  return std::string(text) + " " + std::to_string(port);
}

std::string local_address(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  return ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0 ? address_text(address) : "";
}

std::string remote_address(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  return ::getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0 ? address_text(address) : "";
}

std::vector<int> open_sockets() {
  std::vector<int> found;
  DIR* folder = ::opendir("/proc/self/fd");
  if (folder == nullptr) {
    return found;
  }
  while (const dirent* entry = ::readdir(folder)) {
    const int fd = std::atoi(entry->d_name);
    struct stat status {};
    if (entry->d_name[0] != '.' && ::fstat(fd, &status) == 0 && S_ISSOCK(status.st_mode)) {
      found.push_back(fd);
    }
  }
  ::closedir(folder);
  return found;
}

std::set<std::string> listening_addresses() {
  std::set<std::string> found;
  for (const int fd : open_sockets()) {
    int listening = 0;
    socklen_t length = sizeof(listening);
    if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &length) == 0 && listening != 0) {
      found.insert(local_address(fd));
    }
  }
  return found;
}

// A new device, and the address at which it listens.
std::pair<std::shared_ptr<gloo::transport::Device>, std::string> make_listening_device(const std::string& host) {
  // Process-wide, because descriptors are: no other group's device may appear between the two looks.
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  const auto before = listening_addresses();
  auto device = c10d::ProcessGroupGloo::createDeviceForHostname(host);
  for (const auto& address : listening_addresses()) {
    if (before.count(address) == 0) {
      return {std::move(device), address};
    }
  }
  return {std::move(device), ""};
}

} // namespace

struct SocketTransport::Sockets {
  std::vector<int> duplicates;

  Sockets(const std::string& own, const std::set<std::string>& peers) {
    for (const int fd : open_sockets()) {
      const auto remote = remote_address(fd);
      if (!remote.empty() && (local_address(fd) == own || peers.count(remote) != 0)) {
        if (const int duplicate = ::fcntl(fd, F_DUPFD_CLOEXEC, 0); duplicate >= 0) {
          duplicates.push_back(duplicate);
        }
      }
    }
  }
  ~Sockets() {
    for (const int fd : duplicates) {
      ::close(fd);
    }
  }
  Sockets(const Sockets&) = delete;
  Sockets& operator=(const Sockets&) = delete;
};

class SocketTransport::Group {
 public:
  c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo;
};

SocketTransport::SocketTransport(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const std::string& host)
    : group_(std::make_unique<Group>()) {
  auto [device, address] = make_listening_device(host);
  const auto key = [](int r) { return "device/" + std::to_string(r); };
  store->set(key(rank), std::vector<uint8_t>(address.begin(), address.end()));
  std::set<std::string> peers;
  for (int peer = 0; peer < size; ++peer) {
    const auto text = store->get(key(peer));
    if (peer != rank && !text.empty()) {
      peers.emplace(text.begin(), text.end());
    }
  }
  auto options = c10d::ProcessGroupGloo::Options::create(kFormingTimeout);
  options->devices.push_back(std::move(device));
  options->threads = 1; // Only the proof below uses them; send and recv run on the device's thread.
  group_->gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(
      c10::make_intrusive<c10d::PrefixStore>("gloo", store), rank, size, options);
  sockets_ = std::make_unique<Sockets>(address, peers);
  // A peer that died after publishing its address leaves others with a group that only looks formed.
  std::vector<at::Tensor> proof{at::ones({1}, at::kInt)};
  group_->gloo->allreduce(proof)->wait();
  TORCH_CHECK(
      proof[0].item<int>() == size, "[connect] the first all-reduce over ", size, " ranks counted ",
      proof[0].item<int>());
  group_->gloo->setTimeout(kRunningTimeout);
}

SocketTransport::~SocketTransport() = default;

SocketTransport::Handle SocketTransport::send(const void* data, std::size_t bytes, int peer, int tag) {
  // Gloo's signature wants a mutable tensor; it only reads it.
  std::vector<at::Tensor> tensors{
      at::from_blob(const_cast<void*>(data), {static_cast<std::int64_t>(bytes)}, at::TensorOptions(at::kByte))};
  const std::lock_guard lock(mutex_);
  return group_->gloo->send(tensors, peer, tag);
}

SocketTransport::Handle SocketTransport::receive(void* data, std::size_t bytes, int peer, int tag) {
  std::vector<at::Tensor> tensors{
      at::from_blob(data, {static_cast<std::int64_t>(bytes)}, at::TensorOptions(at::kByte))};
  const std::lock_guard lock(mutex_);
  return group_->gloo->recv(tensors, peer, tag);
}

void SocketTransport::wait(const Handle& handle) {
  {
    const std::lock_guard lock(waiting_mutex_);
    TORCH_CHECK(!shut_, "the connections of this group were cut");
    waiting_for_ = handle;
  }
  const auto done = c10::make_scope_exit([&] {
    const std::lock_guard lock(waiting_mutex_);
    waiting_for_.reset();
  });
  // Without a limit Gloo takes the one from when the group was formed.
  TORCH_CHECK(handle->wait(kRunningTimeout), "the connections of this group were cut");
}

void SocketTransport::shut() noexcept {
  for (const int fd : sockets_->duplicates) {
    ::shutdown(fd, SHUT_RDWR);
  }
  // Ends most waits; but Gloo forgets a transfer that was about to be written when its connection ended.
  const std::lock_guard lock(waiting_mutex_);
  shut_ = true;
  if (waiting_for_) {
    waiting_for_->abort();
  }
}

} // namespace ebb::comm
