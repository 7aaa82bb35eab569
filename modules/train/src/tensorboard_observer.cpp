#include "ebb/train/tensorboard_observer.h"

#include "ebb/base/log.h"
#include "ebb/train/sampling.h"

namespace ebb::train {

TensorBoardObserver::TensorBoardObserver(const std::filesystem::path& directory, const Clock& clock)
    : file_(directory, clock) {}

void TensorBoardObserver::on_step(const StepInfo& info) {
  on_metrics(info.step, info.metrics);
}

void TensorBoardObserver::on_metrics(std::int64_t step, const std::map<std::string, double>& metrics) {
  if (failed_) {
    return;
  }
  std::map<std::string, double> grouped;
  for (const auto& [name, value] : metrics) {
    grouped[name.find('/') == std::string::npos ? "train/" + name : name] = value;
  }
  note(file_.scalars(step, grouped));
}

void TensorBoardObserver::on_text(std::int64_t step, const std::string& name, const std::string& text) {
  if (!failed_) {
    note(file_.text(step, name, printable(text))); // the format wants UTF-8
  }
}

void TensorBoardObserver::note(bool written) {
  if (!written) {
    failed_ = true;
    log::warn("cannot write {}; TensorBoard will miss what comes from here on", file_.path().string());
  }
}

} // namespace ebb::train
