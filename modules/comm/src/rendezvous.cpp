#include "rendezvous.h"

#include "ebb/base/error.h"
#include "ebb/base/log.h"

#include "liveness_report.h"
#include "rendezvous_net.h"
#include "rendezvous_token.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>

namespace ebb::comm {
namespace {

using namespace std::chrono_literals;

constexpr auto kClientTimeout = 30s; // of single calls; the store's own timeouts do not hold when its server is frozen

std::string job_key(const std::string& attempt) {
  return "ebb/job/" + attempt;
}

// Polls instead of Store::wait, which serialises the client, prints two lines when it times out and knows no second
// condition.
template <class Condition>
bool poll_until(Clock::TimePoint deadline, const Condition& condition) {
  for (auto pause = 1ms;; pause = std::min(2 * pause, std::chrono::milliseconds(100))) {
    if (condition()) {
      return true;
    }
    if (std::chrono::steady_clock::now() > deadline) {
      return false;
    }
    std::this_thread::sleep_for(pause);
  }
}

/// Tells one process from every other, on any host and after restarts.
std::string identity() {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  // The 22nd field is the start time; the second, the program's name, may hold spaces.
  std::ifstream file("/proc/self/stat");
  std::string stat((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::istringstream fields(stat.substr(std::min(stat.size(), stat.rfind(')') + 1)));
  std::string start;
  for (int field = 3; field <= 22; ++field) {
    fields >> start;
  }
  return "process " + std::to_string(::getpid()) + " on host " + host.data() + " started at tick " + start;
}

std::string joined_key(int rank) {
  return "joined/" + std::to_string(rank);
}

/// @return  How many groups this rank has joined, with this one.
std::int64_t claim_rank(c10d::Store& job, int rank) {
  const auto mine = identity();
  const auto owner = job.compareSet("rank/" + std::to_string(rank), "", mine);
  TORCH_CHECK_VALUE(
      owner == mine, "[init] rank ", rank, " has already joined this job: ", owner, "; this is ", mine,
      ". Give every process a rank of its own, and every job a port of its own");
  return job.add(joined_key(rank), 1);
}

std::string missing_ranks(c10d::Store& job, int size, std::int64_t generation) {
  constexpr int kNamed = 8;
  std::vector<int> missing;
  for (int rank = 0; rank < size; ++rank) {
    if (job.add(joined_key(rank), 0) < generation) {
      missing.push_back(rank);
    }
  }
  std::string text = missing.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < missing.size() && i < kNamed; ++i) {
    text += (i ? ", " : "") + std::to_string(missing[i]);
  }
  return missing.size() > kNamed ? text + " and " + std::to_string(missing.size() - kNamed) + " more" : text;
}

} // namespace

HostedStore host_store(const std::vector<std::string>& addresses, int port) {
  Listener listener;
  std::string address;
  for (const auto& candidate : addresses) {
    address = candidate;
    listener = listen_on(candidate, port);
    if (listener.fd >= 0 || errno != EADDRNOTAVAIL) {
      break;
    }
  }
  TORCH_CHECK_VALUE(
      listener.fd >= 0, "[init] cannot serve the store on ", address, " port ", port, ": ", std::strerror(errno),
      errno == EADDRINUSE ? "; another program uses it, set MASTER_PORT to a free port for all ranks"
                          : "; set MASTER_ADDR to an address of the host of rank 0");
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(listener.port);
  options.isServer = true;
  options.waitWorkers = false;
  options.timeout = kClientTimeout;
  options.masterListenFd = listener.fd; // c10d itself would listen on all interfaces
  return {c10::make_intrusive<c10d::TCPStore>(address, options), listener.port};
}

StorePtr connect_store(const std::string& host, int port, Clock::TimePoint deadline) {
  const auto start = std::chrono::steady_clock::now();
  const auto address = wait_for_server(host, port, deadline);
  if (address.empty()) {
    EBB_THROW(
        TimeoutError, "[init] no store answers at ", host, ":", port, " after ",
        seconds_between(start, std::chrono::steady_clock::now()),
        " s; check that rank 0 was started, that its host is reachable under this name and that the port is not "
        "blocked");
  }
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(port);
  options.waitWorkers = false;
  options.timeout = kClientTimeout;
  return c10::make_intrusive<c10d::TCPStore>(address, options);
}

void open_job(const StorePtr& store, const std::string& token, const std::string& attempt) {
  const auto nonce = random_token();
  store->compareSet(job_key(attempt), "", nonce + " " + keyed_hash(token, "job " + nonce));
}

StorePtr enter_job(
    const StorePtr& store, const std::string& token, const std::string& attempt, Clock::TimePoint deadline) {
  const auto key = job_key(attempt);
  if (!poll_until(deadline, [&] { return store->check({key}); })) {
    EBB_THROW(
        TimeoutError, "[init] the store answers, but rank 0 has not opened the job; check that rank 0 was started");
  }
  std::istringstream in(store->get_to_str(key));
  std::string nonce;
  std::string proof;
  in >> nonce >> proof;
  TORCH_CHECK_VALUE(
      proof == keyed_hash(token, "job " + nonce),
      "[init] refused: the job at this address has another token than this process; the port belongs to another job, "
      "or EBB_TOKEN differs. Start all ranks by the same launcher, or with the same EBB_TOKEN, and give each job a "
      "port of its own");
  return c10::make_intrusive<c10d::PrefixStore>("ebb/" + attempt + "/" + keyed_hash(token, "keys " + nonce), store);
}

StorePtr join_job(const StorePtr& job, int rank, int size, bool hosts_store, Clock::TimePoint deadline) {
  const auto start = std::chrono::steady_clock::now();
  const auto generation = claim_rank(*job, rank);
  const auto name = "group" + std::to_string(generation);
  StorePtr group = c10::make_intrusive<c10d::PrefixStore>(name, job);
  if (rank == 0) {
    job->set("generation", std::to_string(generation));
    if (hosts_store) {
      set_store_host(group, rank);
    }
  }
  if (group->add("arrived", 1) == size) {
    group->set("full", "1");
  }
  const bool full = poll_until(deadline, [&] {
    // A rank may well have come, done its work and ended while this one slept: look for the full group on both sides.
    if (group->check({"full"})) {
      return true;
    }
    if (job->check({"ended"}) && !group->check({"full"})) {
      const auto ended = LossReport::parse(job->get_to_str("ended"));
      EBB_THROW_RANK_LOST(
          ended.rank, "[init] rank ", ended.rank, " ended before all ranks had joined: ", ended.why,
          ". See its own messages for the cause");
    }
    return false;
  });
  if (!full) {
    EBB_THROW(
        TimeoutError, "[init] rank ", rank, " waited ", seconds_between(start, std::chrono::steady_clock::now()),
        " s for ", size, " ranks; ", missing_ranks(*job, size, generation),
        " did not join. Check that they were started and can reach the store");
  }
  return group;
}

void report_end(const StorePtr& job, int rank, bool failed, const std::string& why) {
  const LossReport report{rank, why};
  job->compareSet("ended", "", report.text());
  if (failed && job->check({"generation"})) {
    const int newest = std::stoi(job->get_to_str("generation"));
    report_loss(c10::make_intrusive<c10d::PrefixStore>("group" + std::to_string(newest), job), report);
  }
}

void leave_store(const StorePtr& group) {
  group->add("left", 1);
}

void wait_for_others_to_leave(const StorePtr& group, int size, std::chrono::milliseconds patience) {
  const auto start = std::chrono::steady_clock::now();
  const bool all = poll_until(start + patience, [&] {
    const bool lost = loss_reported(group);
    return group->add("left", 0) >= size - 1 || (lost && std::chrono::steady_clock::now() > start + 1s);
  });
  if (!all) {
    log::warn(
        "rank 0 ends, and with it the store, while others still use it: {} of {} ranks have left",
        group->add("left", 0) + 1, size);
  }
}

} // namespace ebb::comm
