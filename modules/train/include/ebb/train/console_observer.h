#pragma once

#include "ebb/base/observer.h"
#include "ebb/base/progress.h"

#include <iosfwd>
#include <memory>
#include <optional>
#include <string>

namespace ebb::train {

/// Shows a run on a terminal: a progress bar with loss, validation loss, gradient norm, tokens/s, TFLOPS and this rank's
/// peak memory on `progress_out`, and samples, made harmless, on `text_out`. For one rank, the first.
class ConsoleObserver final : public Observer {
 public:
  /// Both streams must outlive the observer.
  ConsoleObserver(std::ostream& progress_out, std::ostream& text_out, const ProgressOptions& options = {});
  void on_run_begin(const RunInfo& info) override;
  void on_step(const StepInfo& info) override;
  void on_metrics(std::int64_t step, const std::map<std::string, double>& metrics) override;
  void on_text(std::int64_t step, const std::string& name, const std::string& text) override;
  void on_run_end(const std::string& why) override;

 private:
  std::ostream& progress_out_;
  std::ostream& text_out_;
  ProgressOptions options_;
  std::int64_t planned_steps_ = 0;
  std::unique_ptr<Progress> progress_;
  std::optional<double> loss_; ///< Smoothed: batches differ more than neighbouring steps do.
  std::optional<double> eval_loss_;
};

} // namespace ebb::train
