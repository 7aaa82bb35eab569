#pragma once

#include <cstdint>
#include <limits>
#include <vector>

namespace ebb::shard {

/// In which part of the work a unit is used. Each has an order of its own.
enum class Pass { kForward, kBackward, kEvaluation };

// Note [Prefetch order]
// Forward follows the order of the last forward, backward the reverse of this step's forward (FSDP paper, section 3.3),
// evaluation the last evaluation. Backward does not need every use of forward again: an embedding's weight is not read
// there, nor that of a first layer whose input needs no gradient. How often each unit was used in the last backward says
// so. A wrong guess costs memory for a moment and never a wrong value. All decisions depend
// on the sequence of uses alone, so that ranks that run the same model make the same ones.

/// Records in which order units are used and says which come next.
class UseOrder {
 public:
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

  explicit UseOrder(int num_units) : num_units_(num_units), backward_uses_(num_units), last_backward_uses_(num_units) {}

  /// The pass moves on to `unit`.
  void visit(int unit, Pass pass);

  /// The next `count` different units, soonest first; fewer when not known.
  std::vector<int> upcoming(int count) const;

  /// Visits until `unit` is used again; kNever when nothing is known of it.
  std::int64_t next_use(int unit) const;

  /// A backward is over (or has failed): the next forward begins.
  void end_step();

  /// Units in the order of this step's visits so far, for checks and tests.
  const std::vector<int>& forward_visits() const {
    return forward_.current;
  }

 private:
  // One repeated sequence: what was seen this time, what was seen last time, and where in it we are.
  struct Sequence {
    std::vector<int> current;
    std::vector<int> last;
    std::int64_t cursor = -1; ///< Index into last of the newest visit; -1 when it is not there.

    void visit(int unit);
    void restart();
  };

  int num_units_;
  Pass pass_ = Pass::kForward;
  Sequence forward_;
  Sequence evaluation_;
  /// Whether backward is expected to use `unit` again, after `uses` uses in it.
  bool backward_needs(int unit, int uses) const {
    return !knows_backward_ || uses < last_backward_uses_[unit];
  }

  std::int64_t backward_cursor_ = 0; ///< Backward has used forward_.current from here on.
  std::vector<int> backward_uses_; ///< By unit, in this backward.
  std::vector<int> last_backward_uses_;
  bool knows_backward_ = false;
};

} // namespace ebb::shard
