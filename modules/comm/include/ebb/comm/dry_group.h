#pragma once

#include "ebb/comm/communicator.h"
#include "ebb/comm/flight_recorder.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace ebb::comm {

/// A group in which this process is rank `rank` of `size` and the other ranks are nobody: collectives are checked,
/// counted and written down, and move nothing. For dry runs, of any size in one process. Where ranks agree by
/// exchange(), the others say what this one says. Groups that Mesh splits off it are dry as well.
/// Bytes sent are those of the direct algorithms: an all-gather sends the input to each of the others, a reduce-scatter
/// one part of the input, an all-reduce both of these.
/// @throws ValueError unless 0 <= rank < size.
std::shared_ptr<Communicator> dry_group(int rank, int size);

/// Every collective of a dry group and of the groups split off it, oldest first, since the last clear.
/// @throws ValueError for a group that is not dry.
std::vector<CollectiveRecord> dry_collectives(const Communicator& group);
/// What this rank would have sent for them.
/// @throws ValueError for a group that is not dry.
std::int64_t dry_bytes_sent(const Communicator& group);
/// Forgets them.
void clear_dry_collectives(Communicator& group);

} // namespace ebb::comm
