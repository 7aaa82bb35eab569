#include "ebb/train/batch_schedule.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>

namespace ebb::train {
namespace {

/// The whole of [begin, end) as a number, or -1.
std::int64_t number_of(const char* begin, const char* end) {
  std::int64_t value = -1;
  const auto [last, error] = std::from_chars(begin, end, value);
  return error == std::errc() && last == end ? value : -1;
}

} // namespace

BatchPlan plan_batch(std::int64_t global_batch, std::int64_t max_micro_batch, int world_size) {
  TORCH_CHECK_VALUE(
      global_batch >= 1 && max_micro_batch >= 1 && world_size >= 1,
      "[plan_batch] expected a global batch, a micro-batch and a number of ranks of at least 1, got ", global_batch,
      ", ", max_micro_batch, " and ", world_size);
  TORCH_CHECK_VALUE(
      global_batch % world_size == 0, "[plan_batch] expected a global batch that ", world_size,
      " ranks can share equally, got ", global_batch, "; take a multiple of ", world_size, ", such as ",
      (global_batch / world_size + 1) * world_size);
  const auto part = global_batch / world_size;
  auto accumulate = (part + max_micro_batch - 1) / max_micro_batch;
  while (part % accumulate != 0) {
    ++accumulate;
  }
  return {.global_batch = global_batch, .micro_batch = part / accumulate, .accumulate = accumulate};
}

std::vector<BatchStage> parse_batch_schedule(const std::vector<std::string>& texts) {
  std::vector<BatchStage> schedule;
  for (const auto& text : texts) {
    const auto colon = std::min(text.find(':'), text.size());
    const auto* begin = text.data();
    const BatchStage stage{
        .from = number_of(begin, begin + colon),
        .global_batch = number_of(begin + std::min(colon + 1, text.size()), begin + text.size())};
    TORCH_CHECK_VALUE(
        stage.from >= 0 && stage.global_batch >= 0,
        "[batch_schedule] expected STEP:SAMPLES, two whole numbers such as 1000:64, got '", text, "'");
    schedule.push_back(stage);
  }
  return schedule;
}

void check_batch_schedule(const std::vector<BatchStage>& schedule, int world_size) {
  std::int64_t before = 0;
  for (const auto& [from, global_batch] : schedule) {
    TORCH_CHECK_VALUE(
        from > before, "[batch_schedule] expected stages from above 0, each later than the last, got ", from, " after ",
        before, "; what begins at 0 is the first global batch");
    TORCH_CHECK_VALUE(
        global_batch >= 1 && global_batch % world_size == 0, "[batch_schedule] expected a global batch from ", from,
        " on that ", world_size, " rank(s) can share equally, got ", global_batch, "; take a multiple of ", world_size);
    before = from;
  }
}

std::int64_t scheduled_batch(const std::vector<BatchStage>& schedule, std::int64_t first, std::int64_t done) {
  auto global_batch = first;
  for (const auto& stage : schedule) {
    if (stage.from <= done) {
      global_batch = stage.global_batch;
    }
  }
  return global_batch;
}

} // namespace ebb::train
