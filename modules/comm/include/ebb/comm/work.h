#pragma once

namespace ebb::comm {

/// A collective under way.
///
/// Not thread-safe. Dropping a Work abandons its result, not the operation: the group keeps both tensors alive until it
/// has ended, and stays usable; until then the output is still written to.
class Work {
 public:
  virtual ~Work() = default;

  /// Moves the operation on as far as it goes without waiting, and says whether the output is valid. May copy and add
  /// meanwhile: with peers' memory at hand that is the transfer itself.
  /// @throws as wait().
  virtual bool poll() = 0;

  /// Returns when the output is valid. CUDA: valid for what the current stream does next.
  /// @throws RankLostError when a peer died, TimeoutError when one did not arrive; both name rank, operation, unit, step.
  virtual void wait() = 0;

  /// Returns when, beyond wait(), peers have finished with this rank's input, so that it may be overwritten. Only
  /// backends that let peers read the input in place make a difference between the two. Operations move on only inside
  /// calls of the group and its Works, so peers wait here for a rank that makes none.
  /// @throws as wait().
  virtual void release() {
    wait();
  }
};

} // namespace ebb::comm
