#pragma once

#include "ebb/base/job.h"
#include "ebb/data/window_order.h"
#include "ebb/train/train_job.h"

#include <utility>
#include <vector>

namespace ebb::train {

/// A paused TrainJob. Tensors are copies.
struct TrainState final : JobState {
  std::int64_t step() const override {
    return steps_done;
  }

  std::vector<std::pair<std::string, std::string>> made_by; ///< describe() of the job.
  std::int64_t steps_done = 0;
  TrainTotals totals;
  std::map<std::string, double> metrics;
  data::Cursor cursor;
  std::vector<Named> parameters;
  std::vector<Named> buffers;
  std::string optimizer;
  std::vector<at::Tensor> generators;
};

/// What must be equal for a state to fit a job: every option, the data's size, the ranks.
std::vector<std::pair<std::string, std::string>> describe(const TrainSetup& setup);

/// @throws IncompatibleStateError naming the first thing that differs.
void check_compatible(const TrainState& state, const TrainSetup& setup);

std::vector<Named> copies_of(const std::vector<Named>& tensors);
void copy_into(const std::vector<Named>& to, const std::vector<Named>& from);

/// States of LibTorch's default generators for the CPU and, where that is another device, for `device`.
std::vector<at::Tensor> generator_states(c10::Device device);
void set_generator_states(c10::Device device, const std::vector<at::Tensor>& states);

} // namespace ebb::train
