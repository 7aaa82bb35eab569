#pragma once

#include "ebb/base/error.h"

#include "operation_header.h"

#include <string>

namespace ebb::comm {

/// Throws RankLostError. `rank` is the lost rank in this group, -1 when unknown.
[[noreturn]] inline void throw_rank_lost(int rank, std::string message) {
  throw RankLostError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, std::move(message), rank);
}

/// The error for an operation that cannot end because `rank` is gone.
[[noreturn]] inline void throw_rank_lost(const Operation& operation, int rank, const std::string& why) {
  throw_rank_lost(
      rank, c10::str(
                "[", name_of(operation.op), "] ",
                rank >= 0 ? c10::str("rank ", rank, " is lost") : std::string("a peer is lost"), " (", why, "), so ",
                describe(operation), " cannot end; this group is unusable: drop it and connect those that are left"));
}

/// Two ranks call different things where all must call the same.
[[noreturn]] inline void throw_mismatch(
    const Operation& operation, int own_rank, int peer, const OperationHeader& own, const OperationHeader& theirs) {
  C10_THROW_ERROR(
      ValueError,
      c10::str(
          "[", name_of(operation.op), "] collective ", operation.number, " differs between ranks at step ",
          operation.step, ": rank ", own_rank, " calls ", own.text(), "; rank ", peer, " calls ", theirs.text(),
          ". All ranks must make the same calls in the same order, with tensors of one size and dtype"));
}

} // namespace ebb::comm
