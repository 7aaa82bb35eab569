#include "ebb/train/batch_controller.h"

#include "ebb/base/error.h"
#include "ebb/base/log.h"
#include "ebb/base/options.h"
#include "shared_numbers.h"

#include <algorithm>
#include <string>
#include <utility>

namespace ebb::train {
namespace {

void check(const BatchOptions& options, int world_size) {
  plan_batch(options.global_batch, options.max_micro_batch, world_size);
  TORCH_CHECK_VALUE(
      options.schedule.empty() || !options.noise,
      "[BatchController] expected a schedule or growth by noise, got both; choose one");
  check_batch_schedule(options.schedule, world_size);
  if (const auto& noise = options.noise) {
    TORCH_CHECK_VALUE(
        noise->factor >= 2 && noise->patience >= 1,
        "[BatchController] noise: expected a factor of at least 2 and a patience of at least 1, got ", noise->factor,
        " and ", noise->patience);
    TORCH_CHECK_VALUE(
        noise->max_global_batch >= options.global_batch,
        "[BatchController] noise: expected a max_global_batch of at least the first, ", options.global_batch, ", got ",
        noise->max_global_batch);
  }
}

std::vector<double> numbers_of(const BatchOptions& options) {
  const auto& noise = options.noise;
  std::vector<double> numbers{
      static_cast<double>(options.global_batch),
      static_cast<double>(options.clock),
      static_cast<double>(options.schedule.size()),
      noise ? static_cast<double>(noise->max_global_batch) : -1,
      noise ? static_cast<double>(noise->factor) : -1,
      noise ? static_cast<double>(noise->patience) : -1,
      noise ? noise->decay : -1};
  for (const auto& stage : options.schedule) {
    numbers.push_back(static_cast<double>(stage.from));
    numbers.push_back(static_cast<double>(stage.global_batch));
  }
  return numbers;
}

// Lists of different lengths are compared too: as text, which exchange() takes at any length.
void check_same_on_all_ranks(const BatchOptions& options, comm::Communicator& world) {
  std::string text;
  for (const double number : numbers_of(options)) {
    text += option_text(number) + " ";
  }
  const auto all = world.exchange(text);
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] != all[0]) {
      EBB_THROW(
          IncompatibleStateError, "[BatchController] the options of rank ", rank,
          " differ from those of rank 0; give every rank the same global batch, schedule and growth");
    }
  }
}

std::int64_t smallest(comm::Communicator& world, std::int64_t mine) {
  double least = static_cast<double>(mine);
  for (const auto& theirs : shared_numbers(world, {least})) {
    least = std::min(least, theirs[0]);
  }
  return static_cast<std::int64_t>(least);
}

} // namespace

BatchController::BatchController(BatchOptions options, std::shared_ptr<comm::Communicator> world)
    : options_(std::move(options)), world_(std::move(world)), noise_(options_.noise ? options_.noise->decay : 0) {
  TORCH_CHECK_VALUE(world_, "[BatchController] expected the group of all ranks, got none");
  check_same_on_all_ranks(options_, *world_);
  options_.max_micro_batch = smallest(*world_, options_.max_micro_batch);
  check(options_, world_->size());
  plan_ = plan_batch(options_.global_batch, options_.max_micro_batch, world_->size());
}

std::int64_t BatchController::scheduled(std::int64_t steps, std::int64_t tokens) const {
  return scheduled_batch(
      options_.schedule, options_.global_batch, options_.clock == BatchClock::kSteps ? steps : tokens);
}

void BatchController::count(std::int64_t tokens) {
  TORCH_CHECK_VALUE(tokens >= 0, "[BatchController::step_done] expected at least 0 tokens, got ", tokens);
  ++steps_;
  tokens_ += tokens;
  if (!options_.noise) {
    plan_ = plan_batch(scheduled(steps_, tokens_), options_.max_micro_batch, world_->size());
  }
}

void BatchController::step_done(std::int64_t tokens) {
  count(tokens);
}

void BatchController::step_done(std::int64_t tokens, const GradientNorms& norms) {
  TORCH_CHECK_VALUE(
      options_.noise, "[BatchController::step_done] norms are of use with BatchOptions::noise only; leave them out");
  const auto all =
      shared_numbers(*world_, {norms.small_squared, norms.big_squared, static_cast<double>(norms.small_batch)});
  double small_squared = 0;
  for (const auto& theirs : all) {
    small_squared += theirs[0] / static_cast<double>(all.size());
    TORCH_CHECK_VALUE(
        theirs[2] == all[0][2], "[BatchController::step_done] expected the same small_batch on all ranks, got ",
        all[0][2], " and ", theirs[2]);
  }
  // Of rank 0 for all: the norm of equal gradients may differ by a bit between kinds of processors.
  const double big_squared = all[0][1];
  const auto small_batch = norms.small_batch > 0 ? norms.small_batch : plan_.global_batch / world_->size();
  const bool measured = noise_.update(
      small_squared, static_cast<double>(small_batch), big_squared, static_cast<double>(plan_.global_batch));
  count(tokens);
  if (measured) {
    ++measured_since_growth_;
    grow();
  }
}

void BatchController::grow() {
  const auto& growth = *options_.noise;
  if (plan_.global_batch > growth.max_global_batch / growth.factor || measured_since_growth_ < growth.patience) {
    return;
  }
  const auto next = plan_.global_batch * growth.factor;
  if (noise_.scale() >= static_cast<double>(next)) {
    if (world_->rank() == 0) {
      log::info(
          "the noise scale is {:.1f}: the global batch grows from {} to {}", noise_.scale(), plan_.global_batch, next);
    }
    plan_ = plan_batch(next, options_.max_micro_batch, world_->size());
    measured_since_growth_ = 0;
  }
}

void BatchController::set_max_micro_batch(std::int64_t max_micro_batch) {
  const auto agreed = smallest(*world_, max_micro_batch);
  plan_ = plan_batch(plan_.global_batch, agreed, world_->size());
  options_.max_micro_batch = agreed;
}

BatchState BatchController::state() const {
  return {
      .steps = steps_,
      .tokens = tokens_,
      .global_batch = plan_.global_batch,
      .max_micro_batch = options_.max_micro_batch,
      .measured_since_growth = measured_since_growth_,
      .noise = noise_.state()};
}

bool BatchController::can_grow_to(std::int64_t global_batch) const {
  auto reached = options_.global_batch;
  while (reached < global_batch && reached <= options_.noise->max_global_batch / options_.noise->factor) {
    reached *= options_.noise->factor;
  }
  return reached == global_batch;
}

void BatchController::load(const BatchState& state) {
  if (state.steps < 0 || state.tokens < 0 || state.max_micro_batch < 1 || state.measured_since_growth < 0) {
    EBB_THROW(
        IncompatibleStateError, "[BatchController::load] expected the state of a controller, got ", state.steps,
        " steps, ", state.tokens, " tokens, micro-batches of ", state.max_micro_batch, " and ",
        state.measured_since_growth, " measured steps");
  }
  const bool reachable =
      options_.noise ? can_grow_to(state.global_batch) : state.global_batch == scheduled(state.steps, state.tokens);
  if (!reachable) {
    EBB_THROW(
        IncompatibleStateError, "[BatchController::load] a global batch of ", state.global_batch, " after ",
        state.steps, " steps and ", state.tokens,
        " tokens does not follow from these options; load the state into a "
        "controller with the options, and the number of ranks, of the one that left it");
  }
  auto noise = noise_;
  noise.load(state.noise);
  const auto plan = plan_batch(state.global_batch, state.max_micro_batch, world_->size());
  noise_ = noise;
  plan_ = plan;
  options_.max_micro_batch = state.max_micro_batch;
  steps_ = state.steps;
  tokens_ = state.tokens;
  measured_since_growth_ = state.measured_since_growth;
}

} // namespace ebb::train
