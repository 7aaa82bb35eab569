#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace ebb {

/// The phases of a model's life that Wu et al., "Sustainable AI" (MLSys 2022), section 2, account for apart.
enum class Phase { kData, kExperimentation, kOfflineTraining, kOnlineTraining, kInference };

/// Who runs what. Given once, at the start of a run.
struct RunInfo {
  std::string name;
  std::string directory; ///< Where the run keeps its files; empty when it keeps none.
  int rank = 0;
  int world_size = 1;
  std::int64_t num_parameters = 0; ///< Of the unsharded model.
  std::int64_t planned_steps = 0; ///< 0 when not known beforehand.
};

/// One optimizer step (or one update of a streaming state).
struct StepInfo {
  std::int64_t step = 0; ///< Steps done, so 1 after the first.
  double seconds = 0; ///< Wall time of this step.
  std::int64_t samples = 0; ///< Over all ranks: sequences, rows.
  std::int64_t tokens = 0; ///< Over all ranks; 0 where there are no tokens.
  double flops = 0; ///< Of this rank, forward and backward; 0 when not known.
  std::map<std::string, double> metrics; ///< "loss", "grad_norm", "lr", ...
};

/// What train and stream tell about their work; what progress bars, TensorBoard and the carbon ledger listen to.
///
/// Every rank calls its own observers, in order, from the thread that trains. An observer must not throw and must not
/// enter a collective. Defaults do nothing, so that an observer states only what it needs.
class Observer {
 public:
  virtual ~Observer() = default;
  /// Before the first step.
  virtual void on_run_begin(const RunInfo&) {}
  /// What is done from here on.
  virtual void on_phase(Phase) {}
  /// After each step.
  virtual void on_step(const StepInfo&) {}
  /// Metrics that do not belong to a step of training: "eval/loss", ...
  virtual void on_metrics(std::int64_t /*step*/, const std::map<std::string, double>& /*metrics*/) {}
  /// Text for people: a sample of what a language model writes, ...
  virtual void on_text(std::int64_t /*step*/, const std::string& /*name*/, const std::string& /*text*/) {}
  /// Samples that were worked on since the last call, over all ranks.
  virtual void on_samples(std::int64_t /*count*/) {}
  /// The job goes on with another number of ranks.
  virtual void on_resize(int /*old_world_size*/, int /*new_world_size*/) {}
  /// A checkpoint is complete.
  virtual void on_checkpoint(const std::string& /*path*/, std::int64_t /*bytes*/) {}
  /// After the last step, or the error that ended the run.
  virtual void on_run_end(const std::string& /*why: "done", "stopped", "failed: ..."*/) {}
};

} // namespace ebb
