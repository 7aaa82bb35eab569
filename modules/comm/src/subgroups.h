#pragma once

#include "ebb/comm/init.h"

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace ebb::comm {

/// The groups that were split off a group. They end with it where it is aborted.
class Subgroups {
 public:
  /// A group of `ranks`, which rendezvous under a prefix of the parent's store.
  std::shared_ptr<Communicator> split(
      const c10::intrusive_ptr<c10d::Store>& store, int own_rank, const std::vector<int>& ranks,
      const std::string& name, const GroupOptions& options);
  void abort() noexcept;

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<Communicator>> groups_;
  std::map<std::string, int> splits_; ///< How often each name was used: a prefix must be fresh each time.
};

} // namespace ebb::comm
