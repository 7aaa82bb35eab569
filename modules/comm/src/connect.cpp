#include "ebb/comm/init.h"

#include "ebb/base/error.h"
#include "ebb/base/log.h"

#include "connect_group.h"
#include "connect_nccl.h"
#include "failure.h"
#include "hierarchical_communicator.h"
#include "peer_communicator.h"
#include "recorded_communicator.h"
#include "socket_communicator.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <sstream>
#include <thread>

namespace ebb::comm {
namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// Sets `mine` under `topic` and waits for everybody's.
std::vector<std::string> share(
    const StorePtr& store, Health& health, const std::string& topic, const std::string& mine, int rank, int size) {
  const auto key = [&](int r) { return topic + "/" + std::to_string(r); };
  store->set(key(rank), mine);
  int next = 0; // Ranks before this one have written.
  Operation forming{.op = Op::kBarrier, .unit = "the start of the group", .step = -1};
  health.begin(forming);
  health.wait(
      [&](milliseconds limit) {
        const auto end = std::chrono::steady_clock::now() + limit;
        auto pause = 100us;
        while (true) {
          while (next < size && store->check({key(next)})) {
            ++next;
          }
          if (next == size || std::chrono::steady_clock::now() >= end || health.broken()) {
            return next == size || health.broken();
          }
          std::this_thread::sleep_for(pause);
          pause = std::min<std::chrono::microseconds>(2 * pause, 5ms);
        }
      },
      forming);
  if (next < size) {
    health.throw_broken(forming);
  } // Else all have come; what has happened since is the first operation's business.
  std::vector<std::string> all;
  for (int r = 0; r < size; ++r) {
    all.push_back(store->get_to_str(key(r)));
  }
  return all;
}

/// Where the ranks of a group are, as seen by one of them.
struct Neighbourhood {
  HostLayout layout;
  std::unique_ptr<PeerMemory> memory; ///< Attached to the ranks of this host; nullptr where some of them cannot.
};

/// Collective.
Neighbourhood look_around(const StorePtr& store, Health& health, int rank, int size, const GroupOptions& options) {
  TORCH_CHECK_VALUE(
      options.host.find('\n') == std::string::npos, "[connect] expected a host name of one line, got '", options.host,
      "'");
  auto memory = std::make_unique<PeerMemory>(rank, size);
  std::string trouble = options.same_host_reads ? memory->unavailable() : "it is off (GroupOptions::same_host_reads)";
  const auto host = options.host.empty() ? host_identity() : options.host;
  const auto texts =
      share(store, health, "peer", host + '\n' + (trouble.empty() ? memory->address().text() : ""), rank, size);
  std::vector<std::string> hosts;
  std::vector<PeerAddress> peers;
  for (const auto& text : texts) {
    const auto end = text.find('\n');
    hosts.push_back(text.substr(0, end));
    peers.push_back(PeerAddress::parse(text.substr(end + 1)));
  }
  Neighbourhood found{HostLayout(hosts), nullptr};
  const auto& here = found.layout.ranks_of(found.layout.host_of(rank));
  for (const int mate : here) {
    if (peers[mate].host.empty() && trouble.empty()) {
      trouble = "rank " + std::to_string(mate) + " cannot or will not";
    }
  }
  if (trouble.empty()) {
    trouble = memory->attach(peers, here);
  }
  const auto troubles = share(store, health, "attached", trouble, rank, size);
  memory->close_descriptor();
  for (const int mate : here) {
    if (!troubles[mate].empty()) {
      log::debug(
          "ranks of this host talk over sockets, not by reading each other's memory; rank {} says: {}", mate,
          troubles[mate]);
      return found;
    }
  }
  found.memory = std::move(memory);
  return found;
}

std::shared_ptr<Communicator> connect_gloo(
    const StorePtr& store, int rank, int size, const GroupOptions& options, const std::shared_ptr<Health>& health) {
  auto [layout, memory] = look_around(store, *health, rank, size, options);
  if (layout.num_hosts() == 1 && memory) {
    return std::make_shared<PeerCommunicator>(store, rank, size, options, health, std::move(memory));
  }
  if (layout.num_hosts() == 1 || layout.num_rails() == 1) {
    return std::make_shared<SocketCommunicator>(store, rank, size, options, health, std::move(layout));
  }
  return std::make_shared<HierarchicalCommunicator>(
      store, rank, size, options, health, std::move(layout), std::move(memory));
}

std::string joined(const std::vector<std::string>& clauses) {
  std::string text;
  for (const auto& clause : clauses) {
    text += (text.empty() ? "" : "; ") + clause;
  }
  return text;
}

} // namespace

std::shared_ptr<Communicator> connect_group(const StorePtr& store, int rank, int size, const GroupOptions& options) {
  TORCH_CHECK_VALUE(
      size >= 1 && rank >= 0 && rank < size, "[connect] expected a rank in [0, size), got rank ", rank, " of ", size);
  TORCH_CHECK_VALUE(
      options.backend == "auto" || options.backend == "single" || options.backend == "gloo" ||
          options.backend == "nccl",
      "[connect] expected backend 'auto', 'single', 'gloo' or 'nccl', got '", options.backend, "'");
  TORCH_CHECK_VALUE(
      size == 1 || options.backend != "single", "[connect] backend 'single' is for one rank, got ", size,
      "; use 'gloo' or 'auto'");
  if (size == 1) {
    return single_group();
  }
  auto health = std::make_shared<Health>(store, rank, size, options);
  std::shared_ptr<Communicator> group;
  try {
    group = connect_gloo(store, rank, size, options, health);
    if (options.backend == "nccl" || (options.backend == "auto" && cuda_status().num_gpus > 0)) {
      group = connect_nccl(store, std::move(group), options, health);
    }
  } catch (const Error&) {
    throw;
  } catch (const c10::ValueError&) {
    throw;
  } catch (const c10::NotImplementedError&) {
    throw;
  } catch (const std::exception& error) {
    // The store or a connection broke: find out who is lost.
    health->break_group(-1, message_of(error));
    health->throw_broken({.op = Op::kBarrier, .unit = "the start of the group", .step = -1});
  }
  const auto& can = group->capabilities();
  log::debug(
      "group of {} ranks on backend {}: all_gather by {}, reduce_scatter by {}; it lacks {}", size, can.backend,
      can.all_gather, can.reduce_scatter, joined(can.lacks));
  return group;
}

std::shared_ptr<Communicator> connect(const StorePtr& store, int rank, int size, const GroupOptions& options) {
  const auto settings = flight_settings(); // First, so that a bad value is told before anybody waits.
  return record(connect_group(store, rank, size, options), settings);
}

} // namespace ebb::comm
