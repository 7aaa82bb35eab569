#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

namespace ebb::shard {

/// What a thread, and the backwards it calls, did since begin().
struct StepProfile {
  /// Calls of operators that computed or moved something, by name ("aten::mm"); views are none.
  std::map<std::string, std::int64_t> operators = {};
  /// Floating-point operations of matrix products, convolutions and attention, a multiplication and an addition being
  /// two. Attention by formula, whole even where it is causal: 4 B H Tq Tk D forward, 10 B H Tq Tk D backward.
  /// Recurrent layers that LibTorch runs as one operator are not counted.
  std::int64_t flops = 0;
  std::int64_t live_bytes = 0; ///< Of tensors that were allocated since the profiler was made and still live.
  std::int64_t peak_live_bytes = 0;
};

/// Counts operators, FLOPs and the memory of tensors on this thread while it lives. Several may not be nested.
///
/// kDry: nothing is computed and large tensors have no memory, so that a model of any size takes part: build it, shard it
/// over a comm::dry_group() of any number of ranks, and train a step, all with the code that trains it.
///
///   auto world = ebb::comm::dry_group(0, 512);
///   ebb::shard::StepProfiler dry(ebb::shard::StepProfiler::Mode::kDry);
///   GPT model(config);
///   auto sharded = ebb::fully_shard(model, {.mesh = ebb::comm::Mesh(world)});
///   torch::optim::AdamW optimizer(sharded.parameters(), 1e-3);
///   for (int step = 0; step < 2; ++step) { dry.begin(); ... loss.backward(); optimizer.step(); }
///   auto second = dry.profile();       // and what comm::dry_collectives(*world) lists
///
/// The operators are those of a run on the CPU, in the same order, with the shapes and strides that they have there.
/// Tensors of integers, and small ones that come from no large one, have real values; item() of any other gives 0.
/// @throws NotImplementedError in kDry where a shape depends on values (nonzero(), masked_select()), or memory is read
///         by pointer; names the operator.
class StepProfiler {
 public:
  /// What becomes of operators.
  enum class Mode {
    kReal, ///< Computed and counted.
    kDry, ///< Counted.
  };
  explicit StepProfiler(Mode mode);
  ~StepProfiler();
  StepProfiler(const StepProfiler&) = delete;

  /// Counts from zero, and the peak from what is live now.
  void begin();
  StepProfile profile() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

} // namespace ebb::shard
