#include "ebb/train/console_observer.h"

#include "ebb/train/sampling.h"

#include <fmt/core.h>

#include <ostream>

namespace ebb::train {
namespace {

constexpr double kSmoothing = 0.95;

} // namespace

ConsoleObserver::ConsoleObserver(std::ostream& progress_out, std::ostream& text_out, const ProgressOptions& options)
    : progress_out_(progress_out), text_out_(text_out), options_(options) {}

void ConsoleObserver::on_run_begin(const RunInfo& info) {
  planned_steps_ = info.planned_steps;
  progress_ = std::make_unique<Progress>(info.planned_steps, "steps", progress_out_, options_);
}

void ConsoleObserver::on_step(const StepInfo& info) {
  const auto metric = [&](const char* name) {
    const auto found = info.metrics.find(name);
    return found == info.metrics.end() ? 0.0 : found->second;
  };
  loss_ = loss_ ? kSmoothing * *loss_ + (1 - kSmoothing) * metric("loss") : metric("loss");
  if (progress_) {
    progress_->update(
        info.step,
        fmt::format(
            "loss {:.3f}{}, gradient norm {:.3g}, {:.1f}k tokens/s, {:.3f} TFLOPS, peak memory {:.0f} MB a rank",
            *loss_, eval_loss_ ? fmt::format(", validation {:.3f}", *eval_loss_) : "", metric("grad_norm"),
            metric("tokens_per_second") / 1000, metric("tflops"), metric("peak_memory_bytes") / 1e6));
  }
}

void ConsoleObserver::on_metrics(std::int64_t, const std::map<std::string, double>& metrics) {
  if (const auto found = metrics.find("eval/loss"); found != metrics.end()) {
    eval_loss_ = found->second;
  }
}

void ConsoleObserver::on_text(std::int64_t step, const std::string& name, const std::string& text) {
  if (step < planned_steps_) { // The last one belongs to the report of the run.
    text_out_ << "\n" << name << " after step " << step << ":\n" << printable(text) << "\n" << std::endl;
  }
}

void ConsoleObserver::on_run_end(const std::string&) {
  progress_.reset();
}

} // namespace ebb::train
