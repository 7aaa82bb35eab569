#include "peer_memory.h"

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <fstream>
#include <random>
#include <sstream>

namespace ebb::comm {
namespace {

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Where the Yama security module is at its usual setting, a process may be read by its ancestors only, and by whom it
// names and their descendants: our launcher's other children are the other ranks.
void allow_siblings() {
  if (first_line("/proc/sys/kernel/yama/ptrace_scope") == "1") {
    ::prctl(PR_SET_PTRACER, ::getppid(), 0, 0, 0);
  }
}

ControlBlock* map_block(int fd) {
  void* memory = ::mmap(nullptr, sizeof(ControlBlock), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<ControlBlock*>(memory);
}

std::string errno_text(const char* what) {
  return std::string(what) + ": " + std::strerror(errno);
}

} // namespace

std::string host_identity() {
  struct stat pid_namespace {};
  struct stat user_namespace {};
  ::stat("/proc/self/ns/pid", &pid_namespace);
  ::stat("/proc/self/ns/user", &user_namespace);
  std::ostringstream text;
  text << first_line("/proc/sys/kernel/random/boot_id") << '/' << pid_namespace.st_ino << '/' << user_namespace.st_ino
       << '/' << ::geteuid();
  return text.str();
}

std::string PeerAddress::text() const {
  std::ostringstream text;
  text << host << ' ' << pid << ' ' << fd << ' ' << nonce_address << ' ' << nonce;
  return text.str();
}

PeerAddress PeerAddress::parse(const std::string& text) {
  PeerAddress address;
  std::istringstream(text) >> address.host >> address.pid >> address.fd >> address.nonce_address >> address.nonce;
  return address;
}

PeerMemory::PeerMemory(int rank, int size) : rank_(rank), blocks_(size, nullptr) {
  fd_ = ::memfd_create("ebb-control", MFD_CLOEXEC);
  if (fd_ < 0 || ::ftruncate(fd_, sizeof(ControlBlock)) != 0) {
    unavailable_ = errno_text("memfd_create");
    return;
  }
  blocks_[rank] = map_block(fd_);
  if (blocks_[rank] == nullptr) {
    unavailable_ = errno_text("mmap");
    return;
  }
  std::random_device random;
  nonce_ = static_cast<std::uint64_t>(random()) << 32 | random();
  blocks_[rank]->nonce = nonce_;
  allow_siblings();
}

PeerMemory::~PeerMemory() {
  close_descriptor();
  for (auto* block : blocks_) {
    if (block != nullptr) {
      ::munmap(block, sizeof(ControlBlock));
    }
  }
}

void PeerMemory::close_descriptor() {
  if (fd_ >= 0) {
    ::close(fd_);
    fd_ = -1;
  }
}

PeerAddress PeerMemory::address() const {
  return {host_identity(), ::getpid(), fd_, reinterpret_cast<std::uint64_t>(&nonce_), nonce_};
}

std::string PeerMemory::attach(const std::vector<PeerAddress>& peers, const std::vector<int>& ranks) {
  peers_ = peers;
  if (ranks.size() > kMaxPeers) {
    return "more than " + std::to_string(kMaxPeers) + " ranks on one host";
  }
  for (const int peer : ranks) {
    const auto& at = peers[peer];
    const auto name = "rank " + std::to_string(peer) + ": ";
    if (at.host != peers[rank_].host) {
      return name + "on another host, in another container, or of another user";
    }
    if (peer == rank_) {
      continue;
    }
    if (!alive(peer)) {
      return name + errno_text("process_vm_readv");
    }
    const auto path = "/proc/" + std::to_string(at.pid) + "/fd/" + std::to_string(at.fd);
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) {
      return name + errno_text(path.c_str());
    }
    struct stat status {};
    const bool right_size = ::fstat(fd, &status) == 0 && status.st_size == static_cast<off_t>(sizeof(ControlBlock));
    blocks_[peer] = right_size ? map_block(fd) : nullptr;
    ::close(fd);
    if (blocks_[peer] == nullptr || blocks_[peer]->nonce != at.nonce) {
      return name + path + " is not its control block";
    }
  }
  return "";
}

bool PeerMemory::read(int peer, std::uint64_t address, void* to, std::size_t bytes) const {
  auto* into = static_cast<char*>(to);
  while (bytes > 0) {
    iovec local{into, bytes};
    iovec remote{reinterpret_cast<void*>(address), bytes}; // NOLINT(performance-no-int-to-ptr)
    const auto got = ::process_vm_readv(peers_[peer].pid, &local, 1, &remote, 1, 0);
    if (got <= 0) {
      return false;
    }
    into += got;
    address += static_cast<std::uint64_t>(got);
    bytes -= static_cast<std::size_t>(got);
  }
  return true;
}

bool PeerMemory::alive(int peer) const {
  std::uint64_t found = 0;
  return read(peer, peers_[peer].nonce_address, &found, sizeof(found)) && found == peers_[peer].nonce;
}

void PeerMemory::ring(int peer) const {
  // Sequentially consistent on both sides: either the sleeper sees the change that came before, or we see the sleeper.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  auto& block = *blocks_[peer];
  if (block.sleepers.load() != 0) {
    block.bell.fetch_add(1);
    ::syscall(SYS_futex, &block.bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

void PeerMemory::ring_all() const {
  for (int rank = 0; rank < static_cast<int>(blocks_.size()); ++rank) {
    if (blocks_[rank] != nullptr) {
      ring(rank);
    }
  }
}

void PeerMemory::sleep_on(std::atomic<std::uint32_t>& bell, std::uint32_t seen, int limit_us) {
  const timespec limit{limit_us / 1000000, static_cast<long>(limit_us % 1000000) * 1000};
  ::syscall(SYS_futex, &bell, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

} // namespace ebb::comm
