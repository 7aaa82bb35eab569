#include "doctor_checks.h"

#include "ebb/base/error.h"
#include "ebb/comm/cuda_status.h"
#include "ebb/comm/init.h"

#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <fmt/core.h>

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <exception>
#include <map>
#include <thread>

namespace ebb::app {
namespace {

/// Closes a file descriptor at the end of a scope.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) {
      close(fd_);
    }
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const {
    return fd_;
  }

 private:
  int fd_;
};

std::string error_text(int number) {
  return std::generic_category().message(number);
}

/// Adds up 1 + 2 over two ranks (threads) of a Gloo group on `address`. Returns rank 0's view of the backend.
comm::Capabilities try_gloo(const std::string& address) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  comm::Capabilities capabilities;
  std::exception_ptr errors[2];
  const auto rank_body = [&](int rank) {
    std::shared_ptr<comm::Communicator> group;
    try {
      // Over sockets, also where ranks of one host would rather read each other's memory: that has a line of its own.
      group = comm::connect(
          store, rank, 2,
          {.backend = "gloo",
           .timeout = std::chrono::seconds(10),
           .heartbeat = std::chrono::milliseconds(200),
           .dead_after = std::chrono::seconds(2),
           .address = address,
           .same_host_reads = false});
      const auto one = torch::full({1}, 1.0 + rank);
      group->all_reduce(one, comm::ReduceOp::kSum, 1.0, "doctor")->wait();
      TORCH_CHECK(one.item<float>() == 3.0f, "Gloo added 1 and 2 to ", one.item<float>());
      if (rank == 0) {
        capabilities = group->capabilities();
      }
    } catch (...) {
      errors[rank] = std::current_exception();
      if (group) {
        group->abort();
      }
    }
  };
  std::thread peer(rank_body, 1);
  rank_body(0);
  peer.join();
  for (const auto& error : errors) {
    if (error) {
      std::rethrow_exception(error);
    }
  }
  return capabilities;
}

/// A child process that runs `body` and leaves with its result. Nothing but system calls may happen in `body`.
template <class Body>
pid_t in_child(const Body& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(5); // never outlives the check
    _exit(body());
  }
  return child;
}

int exit_code_of_child(pid_t child) {
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) {
    return -1;
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

} // namespace

Check check_gloo(const std::string& address) {
  Check check{.what = "gloo"};
  try {
    const auto capabilities = try_gloo(address);
    check.value = fmt::format(
        "two ranks added up over sockets; all-gather: {}; reduce-scatter: {}", capabilities.all_gather,
        capabilities.reduce_scatter);
  } catch (const std::exception& error) {
    check.verdict = Verdict::kFail;
    check.value = message_of(error);
    check.remedy =
        "ranks on this host cannot talk: look at the lines 'loopback' and 'interface', and at firewall rules for "
        "127.0.0.1";
  }
  return check;
}

Check check_same_host_reads() {
  Check check{.what = "peer memory"};
  // Two siblings, as local ranks are: one holds a number, the other reads it out of its memory.
  static const int secret = 0x0ebb;
  int ready[2];
  int done[2];
  if (pipe(ready) != 0 || pipe(done) != 0) {
    check.verdict = Verdict::kWarn;
    check.value = "not tried: " + error_text(errno);
    check.remedy = "raise the limit of open files: ulimit -n 4096";
    return check;
  }
  const Descriptor ready_read(ready[0]);
  const Descriptor ready_write(ready[1]);
  const Descriptor done_read(done[0]);
  auto done_write = std::make_unique<Descriptor>(done[1]);

  const pid_t owner = in_child([&] {
    close(done[1]);
    prctl(PR_SET_PTRACER, getppid(), 0, 0, 0); // as ranks do: whom their launcher started may read them
    char byte = 1;
    if (write(ready[1], &byte, 1) != 1) {
      return 1;
    }
    return read(done[0], &byte, 1) >= 0 ? 0 : 1; // until the parent closes its end
  });
  char byte = 0;
  pollfd wait_for_owner{.fd = ready[0], .events = POLLIN, .revents = 0};
  int reason = ECHILD;
  if (owner > 0 && poll(&wait_for_owner, 1, 5000) == 1 && read(ready[0], &byte, 1) == 1) {
    const pid_t reader = in_child([&] {
      int copy = 0;
      iovec local{&copy, sizeof(copy)};
      iovec remote{const_cast<int*>(&secret), sizeof(secret)};
      if (process_vm_readv(owner, &local, 1, &remote, 1, 0) != sizeof(copy)) {
        return errno == 0 ? EIO : errno;
      }
      return copy == secret ? 0 : EIO;
    });
    reason = exit_code_of_child(reader);
  }
  done_write.reset();
  exit_code_of_child(owner);

  if (reason == 0) {
    check.value = "ranks of this host may read each other's memory";
  } else {
    check.verdict = Verdict::kWarn;
    check.value = fmt::format("process_vm_readv: {}; ranks of this host use sockets", error_text(reason));
    check.remedy =
        "slower, not wrong. Allow it by sysctl kernel.yama.ptrace_scope=0 or, in a container, --cap-add SYS_PTRACE";
  }
  return check;
}

Check check_nccl() {
  Check check{.what = "nccl"};
  check.value = comm::cuda_status().text;
  return check;
}

Check check_loopback_port() {
  Check check{.what = "loopback"};
  const auto fail = [&](const char* step) {
    check.verdict = Verdict::kFail;
    check.value = fmt::format("{}: {}", step, error_text(errno));
    check.remedy = "bring the loopback interface up (ip link set lo up) and allow local TCP";
    return check;
  };
  const Descriptor server(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  if (server.get() < 0 || bind(server.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      listen(server.get(), 1) != 0 || getsockname(server.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return fail("opening a port on 127.0.0.1");
  }
  const Descriptor client(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (client.get() < 0 || connect(client.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) {
    return fail("connecting to a port on 127.0.0.1");
  }
  check.value = fmt::format("a port on 127.0.0.1 ({} was given) can be opened and reached", ntohs(address.sin_port));
  return check;
}

Check check_interface(const Machine& machine) {
  Check check{.what = "interface"};
  const auto wanted = machine.get("GLOO_SOCKET_IFNAME");
  if (!wanted || wanted->empty()) {
    check.value =
        "GLOO_SOCKET_IFNAME unset: loopback for local ranks, otherwise the interface that leads to MASTER_ADDR";
    return check;
  }
  std::map<std::string, std::string> addresses; // of the interfaces that are up
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) == 0) {
    for (const ifaddrs* entry = list; entry; entry = entry->ifa_next) {
      char text[NI_MAXHOST];
      if (entry->ifa_addr && entry->ifa_addr->sa_family == AF_INET && (entry->ifa_flags & IFF_UP) &&
          getnameinfo(entry->ifa_addr, sizeof(sockaddr_in), text, sizeof(text), nullptr, 0, NI_NUMERICHOST) == 0) {
        addresses[entry->ifa_name] = text;
      }
    }
    freeifaddrs(list);
  }
  if (const auto found = addresses.find(*wanted); found != addresses.end()) {
    check.value = fmt::format("GLOO_SOCKET_IFNAME={} is up at {}", *wanted, found->second);
    return check;
  }
  std::string names;
  for (const auto& [name, address] : addresses) {
    names += (names.empty() ? "" : ", ") + name;
  }
  check.verdict = Verdict::kFail;
  check.value = fmt::format("GLOO_SOCKET_IFNAME={} is not an interface that is up", *wanted);
  check.remedy = fmt::format("set it to one of: {}; or unset it", names);
  return check;
}

Check check_host_name() {
  Check check{.what = "host name"};
  char name[256] = {};
  gethostname(name, sizeof(name) - 1);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* result = nullptr;
  const int code = getaddrinfo(name, nullptr, &hints, &result);
  if (code == 0) {
    char text[NI_MAXHOST] = {};
    getnameinfo(result->ai_addr, result->ai_addrlen, text, sizeof(text), nullptr, 0, NI_NUMERICHOST);
    freeaddrinfo(result);
    check.value = fmt::format("{} is {}", name, text);
  } else {
    check.verdict = Verdict::kWarn;
    check.value = fmt::format("{} does not resolve: {}", name, gai_strerror(code));
    check.remedy = "matters only between hosts: add it to /etc/hosts, or set GLOO_SOCKET_IFNAME";
  }
  return check;
}

} // namespace ebb::app
