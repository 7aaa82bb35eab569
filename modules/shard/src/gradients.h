#pragma once

#include "ebb/comm/work.h"
#include "streams.h"
#include "unit.h"

#include <ATen/core/Tensor.h>

#include <deque>
#include <memory>
#include <optional>
#include <vector>

namespace ebb::shard {

class Engine;

/// Hooks each trainable parameter of `flat`, so that its engine hears of complete gradients.
void attach_gradient_hooks(FlatParameter& flat);

// Note [Reduction order]
// Ranks must start the same reductions in the same order, but a parameter that is unused on one rank makes its unit ready
// at another moment there, or never. So units reduce in an order agreed beforehand: at first reverse module order, later
// the order in which rank 0 saw them ready, taken over by all ranks at the end of a backward that differed. A unit that
// is ready early waits for its turn; one that is not ready at the end of backward reduces with zeros in place of what is
// missing, and a vote over all ranks says which parameters got a gradient anywhere: the others keep none.

/// Averages gradients over the ranks during backward and leaves them on the shards.
class GradientReducer {
 public:
  explicit GradientReducer(Engine& engine);
  ~GradientReducer();

  void on_gradient(Unit& unit, FlatParameter& flat, Member& member);
  /// Frees the gradients that zero_grad() has taken from the leaves, so that activations can have their memory.
  void drop_hidden_gradients();
  /// The end of the step's last backward: reduces what is left, waits, and shows the gradients to optimizers.
  void finish();
  /// The end of another backward: starts to reduce what is left. finish() waits for it and shows the sums.
  void postpone();
  /// Starts the reductions of units whose turn has not come; those without a gradient here take part with zeros.
  void start_rest();
  /// Between backwards: forgets gradients that were reduced and not shown.
  void drop_postponed();
  /// After a failed backward: forgets it.
  void abandon();

  /// How many reductions are under way while the next is filled; at least 1.
  void set_max_in_flight(std::size_t number) {
    max_in_flight_ = number;
  }
  /// Of reduce buffers.
  std::size_t max_buffers() const {
    return max_in_flight_ + 1;
  }
  /// Bytes of reduce buffers made so far.
  std::int64_t buffer_bytes() const {
    return num_buffers_ * buffer_bytes_;
  }

 private:
  struct ReduceBuffer {
    at::Tensor memory;
    Mark free; ///< What used it last.
  };
  struct InFlight {
    Unit* unit = nullptr;
    bool publishes = true; ///< Ends on the shards' gradients; otherwise in `partial`.
    ReduceBuffer buffer;
    std::vector<std::unique_ptr<comm::Work>> works; ///< One per trainable flat, as below.
    std::vector<std::unique_ptr<comm::Work>> replica_works; ///< The second stage, where shards have copies.
    std::vector<at::Tensor> outputs; ///< flat_grad itself where nothing is added or converted.
  };

  bool accumulates_nothing() const;
  /// Whether a gradient of an earlier backward is to be added to: shown by a leaf, or on its way there.
  static bool accumulates(const FlatParameter& flat);
  static bool accumulates_on_leaves(const FlatParameter& flat);
  bool complete(const Unit& unit) const {
    return unit.num_ready == unit.num_trainable;
  }
  at::Tensor slot(const Unit& unit, const FlatParameter& flat) const;
  at::Tensor take_buffer();
  void fill(Unit& unit);
  void start_ready();
  void reduce(Unit& unit);
  void clear_gaps(FlatParameter& flat, const at::Tensor& input);
  void keep_local(Unit& unit);
  void start(Unit& unit);
  void prepare(FlatParameter& flat, bool publishes);
  void launch(FlatParameter& flat, InFlight& reduction);
  double inner_divisor(const FlatParameter& flat) const;
  void make_room(const Unit& unit);
  void move_on();
  void move_oldest_on();
  bool start_replica_stage(InFlight& reduction);
  void collect(InFlight& reduction);
  void collect(FlatParameter& flat, const InFlight& reduction, at::Tensor output);
  void release_oldest();
  void collect_all();
  template <class Predicate>
  bool any_unit(Predicate predicate) const;
  void show_gradient(FlatParameter& flat, Member& member);
  void step_in_backward(Unit& unit);
  at::Tensor vote(bool again);
  void show_gradients(const at::Tensor& votes);
  void agree_on_order();
  void clear_round();

  Engine& engine_;
  std::vector<int> order_; ///< Agreed: indices of units with trainable parameters.
  std::vector<int> ready_order_; ///< As seen on this rank in this backward.
  std::size_t next_ = 0; ///< Into order_: the unit whose turn it is.
  bool again_ = false; ///< A parameter got a gradient after its unit was reduced.
  std::size_t num_members_ = 0;

  std::size_t max_in_flight_ = 1;
  std::int64_t buffer_bytes_ = 0;
  std::int64_t num_buffers_ = 0;
  std::vector<ReduceBuffer> free_buffers_;
  std::vector<at::Tensor> unit_buffers_; ///< By unit index; undefined when the unit has none.
  std::deque<InFlight> in_flight_;
  std::deque<InFlight> releasing_; ///< Collected; peers may still be reading the buffer.
};

} // namespace ebb::shard
