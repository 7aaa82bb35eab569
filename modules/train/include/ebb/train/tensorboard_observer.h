#pragma once

#include "ebb/base/observer.h"
#include "ebb/train/event_file.h"

#include <filesystem>

namespace ebb::train {

/// Writes every metric of a run as a TensorBoard curve, "train/loss" and so on, and samples as text. A metric that has
/// a group in its name already ("eval/loss") keeps it. When the disk is full it says so once and writes no more.
class TensorBoardObserver final : public Observer {
 public:
  /// @throws ValueError when `directory` cannot be written.
  explicit TensorBoardObserver(const std::filesystem::path& directory, const Clock& clock = Clock::real());
  void on_step(const StepInfo& info) override;
  void on_metrics(std::int64_t step, const std::map<std::string, double>& metrics) override;
  void on_text(std::int64_t step, const std::string& name, const std::string& text) override;

 private:
  void note(bool written);

  EventFile file_;
  bool failed_ = false;
};

} // namespace ebb::train
