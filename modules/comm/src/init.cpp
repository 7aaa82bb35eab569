#include "ebb/comm/init.h"

#include "ebb/base/clock.h"
#include "ebb/base/error.h"
#include "ebb/base/log.h"

#include "connect_group.h"
#include "environment.h"
#include "recorded_communicator.h"
#include "rendezvous.h"
#include "rendezvous_net.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <charconv>
#include <csignal>
#include <cstdlib>
#include <future>
#include <optional>
#include <string_view>
#include <thread>

namespace ebb::comm {
namespace {

using namespace std::chrono_literals;
using Ms = std::chrono::milliseconds;

constexpr auto kFrozenStore = 15s; // beyond the deadline, before a store that does not answer is left behind
constexpr auto kLinger = 30s; // of rank 0, when it serves the store

void override_ms(const char* name, Ms& option) {
  const char* text = std::getenv(name);
  if (!text || !*text) {
    return;
  }
  const std::string_view view(text);
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(view.data(), view.data() + view.size(), value);
  TORCH_CHECK_VALUE(
      error == std::errc() && end == view.data() + view.size() && value > 0, "[init] ", name,
      " must be a whole number of milliseconds above 0, got '", text, "'; correct or unset it");
  option = Ms(value);
}

bool all_local(const LaunchEnvironment& env) {
  return env.local_world_size == env.world_size;
}

std::string named_interface() {
  const char* names = std::getenv("GLOO_SOCKET_IFNAME");
  const std::string_view all = names ? names : "";
  return std::string(all.substr(0, all.find(',')));
}

/// The address of the interface that the user names, empty when none is named.
std::string named_address() {
  const auto name = named_interface();
  if (name.empty()) {
    return "";
  }
  auto address = address_of_interface(name);
  TORCH_CHECK_VALUE(
      !address.empty(), "[init] GLOO_SOCKET_IFNAME=", name,
      " is not a network interface of this host with an address; `ip address` lists them");
  return address;
}

/// Where peers reach this process.
std::string own_address(const LaunchEnvironment& env) {
  if (all_local(env)) {
    return "127.0.0.1";
  }
  auto address = named_address();
  if (address.empty()) {
    address = own_address_towards(env.master_addr);
  }
  TORCH_CHECK_VALUE(
      !address.empty() && (!is_loopback(address) || is_loopback(env.master_addr)), "[init] rank ", env.rank,
      " finds no address of its own on the way to MASTER_ADDR=", env.master_addr, " (got '", address,
      "'), so ranks on other hosts cannot reach it; set GLOO_SOCKET_IFNAME to the interface between the hosts");
  return address;
}

/// Where rank 0 serves the store, and the others look for it.
std::vector<std::string> store_addresses(const LaunchEnvironment& env) {
  if (all_local(env)) {
    return {"127.0.0.1"};
  }
  auto addresses = addresses_of(env.master_addr);
  TORCH_CHECK_VALUE(
      !addresses.empty(), "[init] MASTER_ADDR=", env.master_addr,
      " is not known to this host's resolver; set it to a name or address of the host of rank 0");
  // Some systems resolve their own name to 127.0.1.1.
  if (is_loopback(addresses[0]) && !is_loopback(env.master_addr)) {
    auto named = named_address();
    TORCH_CHECK_VALUE(
        !named.empty(), "[init] MASTER_ADDR=", env.master_addr, " is ", addresses[0],
        " on its own host, where ranks on other hosts cannot reach it; set MASTER_ADDR to an address, or "
        "GLOO_SOCKET_IFNAME");
    return {named};
  }
  return addresses;
}

struct Place {
  StorePtr group;
  bool hosts_store = false;
};

Place find_place(const LaunchEnvironment& env, Clock::TimePoint deadline) {
  Place place;
  StorePtr store;
  if (env.store_is_up) {
    store = connect_store(env.master_addr, env.master_port, deadline);
  } else if (env.rank == 0) {
    store = host_store(store_addresses(env), env.master_port).store;
    place.hosts_store = true;
  } else {
    store = connect_store(all_local(env) ? "127.0.0.1" : env.master_addr, env.master_port, deadline);
  }
  if (env.rank == 0 && env.launcher != "ebb") {
    open_job(store, env.token, env.attempt);
  }
  const auto job = enter_job(store, env.token, env.attempt, deadline);
  place.group = join_job(job, env.rank, env.world_size, place.hosts_store, deadline);
  return place;
}

/// Runs `body` on a thread of its own, which is left behind when it does not end in time: a call of a store whose
/// server is frozen hangs, whatever its timeout.
template <class Body>
auto run_until(Clock::TimePoint limit, int log_rank, Body body) -> std::optional<decltype(body())> {
  std::packaged_task<decltype(body())()> task([log_rank, body = std::move(body)] {
    log::set_rank(log_rank);
    return body();
  });
  auto result = task.get_future();
  std::thread thread(std::move(task));
  if (result.wait_until(limit) == std::future_status::ready) {
    thread.join();
    return result.get();
  }
  thread.detach();
  return std::nullopt;
}

/// A member of a group whose store rank 0 serves: rank 0 stays until the others have let go of it.
class Member {
 public:
  Member(std::shared_ptr<Communicator> group, Place place) : group_(std::move(group)), place_(std::move(place)) {}
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;
  ~Member() {
    const int rank = group_->rank();
    const int size = group_->size();
    group_.reset();
    try {
      if (place_.hosts_store) {
        wait_for_others_to_leave(place_.group, size, kLinger);
      } else {
        run_until(std::chrono::steady_clock::now() + 1s, rank, [store = place_.group] {
          leave_store(store);
          return true;
        });
      }
    } catch (const std::exception& error) {
      log::debug("the store was gone before this rank left it: {}", message_of(error));
    }
  }

  Communicator* group() const {
    return group_.get();
  }

 private:
  std::shared_ptr<Communicator> group_;
  Place place_;
};

} // namespace

std::shared_ptr<Communicator> init(const LaunchEnvironment& environment, const GroupOptions& given) {
  const auto& env = environment;
  TORCH_CHECK_VALUE(
      env.world_size >= 1 && env.rank >= 0 && env.rank < env.world_size,
      "[init] rank must be 0 to world_size - 1, got rank ", env.rank, " of ", env.world_size,
      "; take the environment from launch_environment()");
  std::signal(SIGPIPE, SIG_IGN); // Gloo and the store write to sockets whose peer may be gone
  log::set_rank(env.rank);
  GroupOptions options = given;
  override_ms("EBB_HEARTBEAT_MS", options.heartbeat);
  override_ms("EBB_DEAD_AFTER_MS", options.dead_after);
  override_ms("EBB_TIMEOUT_MS", options.timeout);
  if (const char* host = std::getenv("EBB_HOST_ID"); host && *host) {
    options.host = host;
  }
  const auto flight = flight_settings();
  if (env.world_size == 1) {
    return options.backend == "auto" || options.backend == "single"
               ? single()
               : connect(c10::make_intrusive<c10d::HashStore>(), 0, 1, options);
  }
  options.address = own_address(env);
  const auto deadline = std::chrono::steady_clock::now() + options.timeout;
  const auto place =
      run_until(deadline + kFrozenStore, env.rank, [env, deadline] { return find_place(env, deadline); });
  if (!place) {
    EBB_THROW(
        TimeoutError, "[init] the store at ", env.master_addr, ":", env.master_port,
        " takes connections but does not answer; its process is stopped or overloaded");
  }
  log::debug("joined {} ranks through the store at {}:{}", env.world_size, env.master_addr, env.master_port);
  auto group = record(connect_group(place->group, env.rank, env.world_size, options), flight);
  if (env.store_is_up) {
    return group;
  }
  auto member = std::make_shared<Member>(std::move(group), *place);
  return {member, member->group()};
}

} // namespace ebb::comm
