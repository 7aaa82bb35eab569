#pragma once

#include "ebb/base/error.h"

#include <c10/util/intrusive_ptr.h>

#include <optional>
#include <string>

namespace c10d {
class Store;
}

namespace ebb::comm {

/// The key of a group's loss report, and what it holds while nobody is lost: it always exists, so that it can be read
/// in one call with others.
inline constexpr const char* kLostKey = "liveness/lost";
inline constexpr const char* kNobodyLost = "-";

/// That a rank is lost, as it is written in the store for all others.
struct LossReport {
  int rank = -1;
  std::string why;
  std::string text() const;
  static LossReport parse(const std::string& text);
};

/// Reports a loss to a group; the first report stands. Callable by any process that has the group's store.
/// @return  The report that stands.
LossReport report_loss(const c10::intrusive_ptr<c10d::Store>& group, const LossReport& report);

bool loss_reported(const c10::intrusive_ptr<c10d::Store>& group);

/// Notes in the group's store which rank's process serves it, so that its end can be told from a network's.
void set_store_host(const c10::intrusive_ptr<c10d::Store>& group, int rank);
std::optional<int> store_host(const c10::intrusive_ptr<c10d::Store>& group);

} // namespace ebb::comm

/// EBB_THROW for RankLostError, which also carries the rank.
#define EBB_THROW_RANK_LOST(rank, ...) \
  throw ::ebb::RankLostError(          \
      ::c10::SourceLocation{__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, ::c10::str(__VA_ARGS__), (rank))
