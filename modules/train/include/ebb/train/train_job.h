#pragma once

#include "ebb/base/clock.h"
#include "ebb/base/job.h"
#include "ebb/base/observer.h"
#include "ebb/comm/communicator.h"
#include "ebb/data/byte_corpus.h"
#include "ebb/data/window_order.h"
#include "ebb/train/batch_schedule.h"
#include "ebb/train/optimizer.h"
#include "ebb/train/train_options.h"
#include "ebb/train/trainable_model.h"

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace ebb::train {

/// What a TrainJob is made of.
struct TrainSetup {
  TrainableModel model;
  std::shared_ptr<const data::ByteCorpus> corpus;
  std::shared_ptr<comm::Communicator> world; ///< All ranks that train together.
  TrainOptions options = {};
  std::vector<std::shared_ptr<Observer>> observers = {}; ///< This rank's.
  std::string name = "train"; ///< For observers.
  std::string directory = {}; ///< For observers; may be empty.
  const Clock* clock = &Clock::real();
};

/// Sums since the job began, over pauses and resumes.
struct TrainTotals {
  std::int64_t tokens = 0; ///< Trained on, over all ranks.
  double step_seconds = 0; ///< Spent in steps.
  double flops = 0; ///< Of this rank; Note [Model flops].
};

/// Trains a language model on the bytes of a corpus: the loop behind `ebb train`.
///
/// One step: the next global batch, forward, backward, clipping, optimizer at the scheduled rate. After steps that
/// eval_every and sample_every name, and after the last, it evaluates and samples. W ranks of `batch` sequences train
/// as one rank of W x batch would, up to rounding. How a global batch is cut into micro-batches does not matter either.
///
/// Metrics: "loss" (mean over the global batch, before the step's update), "grad_norm" (before clipping), "lr",
/// "tokens_per_second" (all ranks), "tflops" (this rank), "peak_memory_bytes" (this rank); "eval/loss".
///
/// Collective, as Job says; request_stop() alone may come on any rank at any time. One all-reduce of two numbers a step
/// carries the loss and agrees on stopping. Every error ends the job: observers hear "failed: ...".
class TrainJob final : public Job {
 public:
  /// @throws ValueError when options are out of range.
  explicit TrainJob(TrainSetup setup);
  ~TrainJob() override;

  /// A time budget is looked at once a step on each rank, and the first rank whose budget is used ends the advance for
  /// all. An advance that is not finished does at least one step.
  /// @throws c10::Error when the loss is not finite; names the step.
  JobStatus advance(const Budget& budget) override;

  /// Holds in this rank's memory: its part of the parameters, buffers, the optimizer's state, LibTorch's random
  /// generators, the cursor into the data and the step, from which the schedule follows.
  std::shared_ptr<const JobState> pause() override;

  /// Needs a state paused by a job with the same options, parameters, data and number of ranks.
  void resume(const std::shared_ptr<const JobState>& state) override;

  /// @throws NotImplementedError always: shards cannot move between ranks yet.
  void resize(int world_size) override;

  void stop() override;

  /// Asks to end the running (or next) advance after its step, on all ranks. Safe from any thread and in a signal
  /// handler.
  void request_stop() noexcept {
    stop_asked_.store(true, std::memory_order_relaxed);
  }
  /// Whether an advance, an evaluation or a sample ended because some rank asked. The same on all ranks.
  bool stop_agreed() const {
    return stop_agreed_;
  }

  /// Mean loss over the validation windows that the options name, in nats a token. NaN when there are none, and when some
  /// rank was asked to stop before the last of them: stop_agreed() tells. Collective.
  double evaluate();

  /// Text the model writes now. Collective; the same on all ranks.
  std::string sample();

  std::int64_t step() const {
    return step_;
  }
  const TrainTotals& totals() const {
    return totals_;
  }

 private:
  void begin();
  /// Of the next step.
  BatchPlan batch_plan() const;
  void run_step(bool want_stop, bool& stop);
  /// Whether any rank was asked to stop. Collective.
  bool agree_to_stop();
  void report(const StepInfo& info);
  void evaluate_and_sample_when_due();
  void end(const std::string& why);
  JobStatus status() const;
  void set_training(bool training);
  template <class Tell>
  void tell(Tell&& tell_one) {
    for (const auto& observer : setup_.observers) {
      tell_one(*observer);
    }
  }

  TrainSetup setup_;
  c10::Device device_;
  std::vector<BatchStage> schedule_;
  data::WindowOrder order_;
  std::unique_ptr<Optimizer> optimizer_;
  std::int64_t step_ = 0;
  TrainTotals totals_;
  std::map<std::string, double> metrics_;
  bool begun_ = false;
  bool ended_ = false;
  std::optional<bool> training_; ///< The mode the model was last put in.
  std::atomic<bool> stop_asked_{false};
  bool stop_agreed_ = false;
};

} // namespace ebb::train
