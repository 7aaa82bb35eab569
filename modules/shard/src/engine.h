#pragma once

#include "ebb/comm/mesh.h"
#include "ebb/shard/fully_shard.h"
#include "resident_set.h"
#include "shard_stage.h"
#include "streams.h"
#include "unit.h"
#include "use_order.h"
#include "wait_meter.h"

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace ebb::shard {

class GradientReducer;

/// Faults that tests put in, to see that the suite would notice them.
struct Faults {
  int skipped_reduce = -1; ///< Index of a unit that keeps its local gradient.
  int scaled_gradient = -1; ///< Index of a unit whose gradient is 1.01 times what it should be.
  bool wrong_prefetch = false; ///< Prefetches the unit after the predicted one.
};

/// One sharded model: what its operators use, what comes next, and when a backward begins and ends.
///
/// Threads: forward and backward may run on different ones; `mutex_` guards everything and is held across collectives, so
/// each rank has an engine, and a lock, of its own. It is recursive because a gradient hook can run inside a touch. Lock
/// order: engine, then whatever the communicator locks; no call goes from the communicator into the engine. Two threads
/// must not use one model at the same time; on CPU the second is refused while a backward runs.
///
/// In several files: engine.cpp (use, backward), engine_control.cpp and engine_switches.cpp (what users switch),
/// engine_checks.cpp (what is refused), full_parameters.cpp and full_gradients.cpp (the scope), frame_share.cpp.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  Engine(ShardOptions options, std::vector<std::unique_ptr<Unit>> units);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Puts the paged storages under the model and hooks on its parameters. Once, after values were synchronised.
  void take_over();

  // --- called by the fallback
  void touch_and_pin(FlatParameter& flat);
  void unpin(FlatParameter& flat);
  /// Warns, once, of an operator that reads far more units together than there are frames.
  void note_width(std::string_view op, std::size_t num_units);
  void check_write(const FlatParameter& flat, const at::Tensor& written, const std::string& op) const;
  void before_shard_write(FlatParameter& flat);
  /// "'layers.0.weight' (unit 'layers.0')"
  std::string describe(const FlatParameter& flat, const at::Tensor& view) const;

  // --- called by the gradient hooks
  void on_gradient(Unit& unit, FlatParameter& flat, Member& member);

  // --- called by the user, through ShardedModel
  /// Indices of named units. @throws ValueError naming what is not a unit.
  std::vector<int> find_units(std::string_view function, const std::vector<std::string>& names) const;
  void unshard(const std::vector<int>& units);
  void wait_unsharded(const std::vector<int>& units);
  void reshard(const std::vector<int>& units);
  void set_reshard_after_forward(const std::vector<int>& units, bool reshard);
  void set_reshard_after_backward(const std::vector<int>& units, bool reshard);
  void set_prefetch(int unit, Pass pass, std::vector<int> next);
  void set_sync(const std::vector<int>& units, bool sync);
  void enter_no_sync();
  void leave_no_sync();
  bool reduces(const Unit& unit) const {
    return no_sync_scopes_ == 0 && unit.sync;
  }
  /// Whether backward also takes the unit's gradients to the leaves, and to the copies of its shards if there are any.
  bool publishes(const Unit& unit) const {
    return reduces(unit) && (unit.all_reduce || unit.whole || !replicas());
  }
  void set_all_reduce(const std::vector<int>& units, bool all_reduce);
  void set_last_backward(bool last);
  void set_manual_finalization(bool manual);
  void start_finalizing();
  void finish_finalizing();
  void set_max_reductions(int number);
  void set_keep_storage(const std::vector<int>& units, bool keep);
  void set_post_optim_event(std::function<void()> done);
  void set_full_precision(bool full);
  /// Buffers that MixedPrecision has converted, with the dtype they had.
  void set_buffers(std::vector<std::pair<at::Tensor, c10::ScalarType>> buffers) {
    buffers_ = std::move(buffers);
  }
  void share_frames_with(Engine& other);
  /// A unit's gradients are complete on this rank: the place for BackwardPrefetch::kBackwardPost.
  void after_gradients(Unit& unit);

  // --- full-parameter scope
  void begin_full_parameters(const FullParametersOptions& options);
  void end_full_parameters(const FullParametersOptions& options);

  void set_ignored(std::vector<std::pair<std::string, at::Tensor>> parameters) {
    ignored_ = std::move(parameters);
  }
  const std::vector<std::pair<std::string, at::Tensor>>& ignored() const {
    return ignored_;
  }
  void set_optimizer_in_backward(std::function<void(const std::string& name, at::Tensor& leaf)> function);
  /// Drops gradients that were accumulated without being reduced.
  void drop_unsynced();
  /// What drop_unsynced() does to what is not under way. Cannot fail.
  void forget_unsynced();
  void reset();
  Residency residency() const;
  ShardStats stats() const;
  void reset_stats();

  const ShardOptions& options() const {
    return options_;
  }
  const std::vector<std::unique_ptr<Unit>>& units() const {
    return units_;
  }
  /// The ranks over which parameters are sharded, and all ranks.
  comm::Communicator& group() const {
    return *options_.mesh.axis("shard");
  }
  comm::Communicator& world() const {
    return *options_.mesh.world();
  }
  /// The same ranks, for gradients: with ShardOptions::separate_reduce_group other groups.
  comm::Communicator& reduce_group() const {
    return *reduce_mesh_.axis("shard");
  }
  comm::Communicator& reduce_world() const {
    return *reduce_mesh_.world();
  }
  /// The ranks that hold the same shard; nullptr where there are no copies.
  comm::Communicator* replicas() const {
    return reduce_mesh_.has_axis("replicate") && reduce_mesh_.axis("replicate")->size() > 1
               ? reduce_mesh_.axis("replicate").get()
               : nullptr;
  }
  std::int64_t max_reduce_buffers() const;
  bool casts_inputs() const {
    return casts_inputs_;
  }
  double divide_factor() const {
    return options_.gradient_divide_factor.value_or(world().size());
  }
  const std::shared_ptr<Tier>& tier() const {
    return stage_.tier();
  }
  int num_frames() const {
    return resident_.num_frames();
  }
  std::int64_t frame_bytes() const {
    return resident_.frame_bytes();
  }
  const UseOrder& order() const {
    return order_;
  }
  /// Names of units in the order in which their all-gathers and reductions were started; empty unless recording. For
  /// tests of order.
  void record_events(bool on);
  void inject(Faults faults);
  void use_clock(const Clock& clock); ///< For tests of what is measured.
  /// As if the model were on this accelerator. For tests, before the first step.
  void use_streams(c10::Device device);
  const Streams& streams() const {
    return streams_;
  }
  std::vector<std::string> take_events();

 private:
  friend class GradientReducer;
  friend class ResidentSet;

  Pass current_pass() const;
  void drop_failed_backward();
  void end_step();
  /// Whether the backward begins with this call.
  bool begin_backward_if_needed();
  void end_backward();
  std::vector<int> scope_of(const FullParametersOptions& options) const;
  void open(Unit& unit, const FullParametersOptions& options);
  void close(Unit& unit, const FullParametersOptions& options);
  void open_full(FlatParameter& flat, bool only_help, bool on_cpu);
  void close_full(FlatParameter& flat);
  void check_same_gradients(const std::vector<int>& units);
  void open_gradients(FlatParameter& flat, bool only_help, bool on_cpu);
  void close_gradients(FlatParameter& flat, bool writeback);
  void await_optimizer();
  void reshard_all();
  void visit(Unit& unit);
  void check_not_unfrozen(const Unit& unit) const;
  void prefetch();
  bool prefetches_after() const;
  void fetch_ahead();
  /// Whether a unit that is gathered now stays until the end of backward.
  bool keeps(const Unit& unit) const;
  void check_same_order(std::string_view what, const Unit& unit);
  void event(std::string_view what, const Unit& unit);

  ShardOptions options_;
  comm::Mesh reduce_mesh_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::unique_ptr<GradientReducer> reducer_;

  mutable std::recursive_mutex mutex_;
  UseOrder order_;
  Streams streams_;
  ShardStage stage_;
  ResidentSet resident_;
  Unit* current_ = nullptr; ///< The unit visited last.
  std::int64_t tick_ = 0;
  bool armed_ = false; ///< A backward has begun and its end is queued.
  std::weak_ptr<int> backward_; ///< Held by the queued end; gone when it ran or when backward failed.
  std::thread::id backward_thread_;
  bool casts_inputs_ = false;
  bool full_precision_ = false;
  std::vector<std::pair<at::Tensor, c10::ScalarType>> buffers_;
  std::atomic<bool> has_post_optim_event_{false};
  std::function<void()> post_optim_event_;
  int full_scopes_ = 0;
  int no_sync_scopes_ = 0;
  bool last_backward_ = true; ///< Whether the end of the next backward waits for its gradients.
  bool manual_ = false; ///< finish_finalizing() ends backward.
  bool unfinished_ = false; ///< That is due.
  bool warned_of_width_ = false;
  ShardStats stats_;
  WaitMeter meter_{Clock::real()};
  std::function<void(const std::string& name, at::Tensor& leaf)> optimizer_in_backward_;
  std::vector<std::pair<std::string, at::Tensor>> ignored_;
  bool recording_ = false;
  Faults faults_;
  std::vector<std::string> events_;
};

} // namespace ebb::shard
