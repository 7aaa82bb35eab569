#pragma once

#include "ebb/data/byte_corpus.h"
#include "ebb/train/train_job.h"
#include "train_options.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ebb::app {

/// What one rank tells about itself at the end.
struct RankReport {
  std::int64_t peak_memory_bytes = 0;
  std::int64_t parameter_bytes = 0;
};

/// What a run came to; summary.json.
struct RunSummary {
  std::string outcome; ///< "done", "out of time", "stopped by signal 15"
  std::string model;
  std::string strategy;
  std::string backend;
  std::int64_t steps = 0;
  std::int64_t planned_steps = 0;
  std::int64_t num_parameters = 0;
  std::vector<RankReport> ranks;
  std::optional<double> train_loss; ///< Mean over the last 100 steps, or all if there were fewer; nats a byte.
  std::optional<double> grad_norm; ///< Global L2 norm before clipping; mean over the same steps.
  std::optional<double> eval_loss; ///< The newest; nats a byte.
  std::int64_t eval_step = 0; ///< After which eval_loss was taken.
  std::int64_t tokens = 0;
  double seconds = 0; ///< From the first step to the end, evaluations and samples included.
  double step_seconds = 0; ///< Of it, in steps.
  double tflops_per_rank = 0; ///< Over step_seconds; Note [Model flops].
  std::optional<std::string> sample; ///< Printable characters only.
  std::optional<data::WordCount> sample_words; ///< Of three letters and more.

  double tokens_per_second() const { ///< Over step_seconds, all ranks.
    return step_seconds > 0 ? static_cast<double>(tokens) / step_seconds : 0;
  }
};

/// As JSON, indented. What is not known is absent.
std::string as_json(const RunSummary& summary);
/// As text for people.
std::string as_text(const RunSummary& summary);

} // namespace ebb::app
