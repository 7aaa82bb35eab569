#include "ebb/comm/init.h"

#include "ebb/base/error.h"
#include "ebb/base/log.h"

#include "connect_nccl.h"
#include "failure.h"
#include "peer_communicator.h"
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

/// Peers' memory, where every rank of the group can read every other's; else nullptr. Collective.
std::unique_ptr<PeerMemory> attach_peers(
    const StorePtr& store, Health& health, int rank, int size, const GroupOptions& options) {
  auto memory = std::make_unique<PeerMemory>(rank, size);
  std::string trouble = options.same_host_reads ? memory->unavailable() : "it is off (GroupOptions::same_host_reads)";
  const auto texts = share(store, health, "peer", trouble.empty() ? memory->address().text() : "", rank, size);
  std::vector<PeerAddress> peers;
  for (int r = 0; r < size; ++r) {
    if (texts[r].empty() && trouble.empty()) {
      trouble = "rank " + std::to_string(r) + " cannot or will not";
    }
    peers.push_back(PeerAddress::parse(texts[r]));
  }
  if (trouble.empty()) {
    trouble = memory->attach(peers);
  }
  const auto troubles = share(store, health, "attached", trouble, rank, size);
  memory->close_descriptor();
  for (int r = 0; r < size; ++r) {
    if (!troubles[r].empty()) {
      log::debug("ranks talk over sockets, not by reading each other's memory; rank {} says: {}", r, troubles[r]);
      return nullptr;
    }
  }
  return memory;
}

std::string joined(const std::vector<std::string>& clauses) {
  std::string text;
  for (const auto& clause : clauses) {
    text += (text.empty() ? "" : "; ") + clause;
  }
  return text;
}

} // namespace

std::shared_ptr<Communicator> connect(const StorePtr& store, int rank, int size, const GroupOptions& options) {
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
    return single();
  }
  auto health = std::make_shared<Health>(store, rank, size, options);
  std::shared_ptr<Communicator> group;
  try {
    if (auto memory = attach_peers(store, *health, rank, size, options)) {
      group = std::make_shared<PeerCommunicator>(store, rank, size, options, health, std::move(memory));
    } else {
      group = std::make_shared<SocketCommunicator>(store, rank, size, options, health);
    }
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

} // namespace ebb::comm
