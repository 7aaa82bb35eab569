#pragma once

#include "ebb/base/clock.h"

#include <c10/util/intrusive_ptr.h>

#include <string>
#include <vector>

namespace c10d {
class Store;
}

namespace ebb::comm {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// Note [Job token]
// c10d's store lets every client in that reaches its port. So that a stray rank, of another job or with an old
// address, is refused and leaves the group alone:
// - Whoever opens the job (the launcher, or rank 0) writes a random nonce and the keyed hash of the nonce under the
//   token. A rank with another token sees that the hash is not its own, says so and leaves; it has written nothing.
// - All further keys lie under a prefix that is the keyed hash of "keys" and the nonce, which only holders of the token
//   can work out. The token itself never crosses the network.
// This keeps mistakes out, not an attacker who speaks the store's protocol on the private network or host.

/// A store served by this process.
struct HostedStore {
  StorePtr store;
  int port = 0;
};

/// Serves a store on one numeric address, the first of `addresses` that is this host's, and nowhere else.
/// @param port  0: any free one.
/// @throws ValueError when none is this host's or the port is taken.
HostedStore host_store(const std::vector<std::string>& addresses, int port);

/// A client of the store at host:port, waiting for it to come up.
/// @throws TimeoutError when it does not before `deadline`.
StorePtr connect_store(const std::string& host, int port, Clock::TimePoint deadline);

/// Opens the job on `store`, unless it is open. By the launcher, or by rank 0 where the launcher does not know ebb.
void open_job(const StorePtr& store, const std::string& token, const std::string& attempt);

/// The job's own part of `store`, waiting for it to be opened.
/// @throws ValueError when the job has another token, TimeoutError when nobody opens it before `deadline`.
StorePtr enter_job(
    const StorePtr& store, const std::string& token, const std::string& attempt, Clock::TimePoint deadline);

/// Claims `rank` in the job and waits until all `size` ranks have come. May be called again, by all ranks, for a next
/// group: each has a part of the store of its own.
/// @param job         What enter_job() returned.
/// @param hosts_store This process serves the store: its end is the store's.
/// @return            The group's part of the store.
/// @throws ValueError when another process has this rank; TimeoutError with the missing ranks; RankLostError when
///   one has already ended.
StorePtr join_job(const StorePtr& job, int rank, int size, bool hosts_store, Clock::TimePoint deadline);

/// Tells the job's ranks that `rank` has ended: those that wait for it to join and, when it failed, those of the newest
/// group. By the launcher.
void report_end(const StorePtr& job, int rank, bool failed, const std::string& why);

/// Notes that `rank` of a group has let go of the store.
void leave_store(const StorePtr& group);
/// Waits until the other ranks have let go of a store that this process serves. `patience` is cut to a second when the
/// group has lost a rank.
void wait_for_others_to_leave(const StorePtr& group, int size, std::chrono::milliseconds patience);

} // namespace ebb::comm
