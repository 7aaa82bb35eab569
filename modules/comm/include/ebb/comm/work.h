#pragma once

namespace ebb::comm {

/// A collective under way.
///
/// Not thread-safe. Dropping a Work before wait() abandons its result: the group stays usable, but the output must not
/// be read and neither tensor freed before the group is.
class Work {
 public:
  virtual ~Work() = default;

  /// Moves the operation on as far as it goes without waiting, and says whether the output is valid.
  /// @throws as wait().
  virtual bool poll() = 0;

  /// Returns when the output is valid.
  /// @throws RankLostError when a peer died, TimeoutError when one did not arrive; both name rank, operation, unit, step.
  virtual void wait() = 0;

  /// Returns when, beyond wait(), peers have finished with this rank's input, so that it may be overwritten. Only
  /// backends that let peers read the input in place make a difference between the two.
  virtual void release() {
    wait();
  }
};

} // namespace ebb::comm
