#include "ebb/train/train_job.h"

#include "ebb/base/error.h"
#include "ebb/train/memory.h"
#include "ebb/train/sampling.h"
#include "ebb/train/schedule.h"
#include "train_state.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace ebb::train {
namespace {

constexpr std::int64_t kBatchesBetweenStops = 8; // of an evaluation
constexpr double kInfinity = std::numeric_limits<double>::infinity();

TrainSetup checked(TrainSetup setup) {
  check_options(setup.options, "TrainJob");
  TORCH_CHECK_VALUE(
      setup.model.loss && setup.model.parameters && setup.corpus && setup.world && setup.clock,
      "[TrainJob] expected a model with loss and parameters, a corpus, a world and a clock; one of them is missing");
  setup.options.min_lr = setup.options.lowest_lr(); // given or not, a resumed job has the same
  TORCH_CHECK_VALUE(
      *setup.options.min_lr <= setup.options.lr, "[TrainJob] min_lr: expected at most lr (", setup.options.lr,
      "), got ", *setup.options.min_lr);
  return setup;
}

c10::Device device_of(const ParameterSet& parameters) {
  const auto tensors = parameters.named();
  const bool trainable =
      std::any_of(tensors.begin(), tensors.end(), [](const Named& named) { return named.second.requires_grad(); });
  TORCH_CHECK_VALUE(
      trainable, "[TrainJob] none of the model's ", tensors.size(),
      " parameters requires a gradient; there is nothing to train");
  return tensors.front().second.device();
}

} // namespace

TrainJob::TrainJob(TrainSetup setup)
    : setup_(checked(std::move(setup))),
      device_(device_of(*setup_.model.parameters)),
      schedule_(parse_batch_schedule(setup_.options.batch_schedule)),
      order_(setup_.corpus, static_cast<std::uint64_t>(setup_.options.seed)),
      optimizer_(make_optimizer(setup_.options, tensors_of(setup_.model.parameters->named()))) {
  check_batch_schedule(schedule_, setup_.world->size());
}

TrainJob::~TrainJob() = default;

JobStatus TrainJob::advance(const Budget& budget) {
  if (ended_) {
    return status();
  }
  try {
    begin();
    const auto began_at = setup_.clock->now();
    std::int64_t done = 0;
    for (bool stop = false; !stop && step_ < setup_.options.steps; ++done) {
      if (budget.steps && done >= *budget.steps) {
        break;
      }
      const bool out_of_time = budget.seconds && seconds_between(began_at, setup_.clock->now()) >= *budget.seconds;
      run_step(out_of_time, stop);
      evaluate_and_sample_when_due();
      stop = stop || stop_agreed_; // asked during a long evaluation
    }
    if (step_ == setup_.options.steps) {
      end("done");
    }
  } catch (const std::exception& error) {
    end("failed: " + message_of(error));
    throw;
  }
  return status();
}

void TrainJob::begin() {
  if (begun_) {
    return;
  }
  begun_ = true;
  const RunInfo info{
      .name = setup_.name,
      .directory = setup_.directory,
      .rank = setup_.world->rank(),
      .world_size = setup_.world->size(),
      .num_parameters = setup_.model.parameters->num_parameters(),
      .planned_steps = setup_.options.steps};
  tell([&](Observer& observer) { observer.on_run_begin(info); });
  tell([&](Observer& observer) { observer.on_phase(Phase::kOfflineTraining); });
}

BatchPlan TrainJob::batch_plan() const {
  const auto& options = setup_.options;
  const auto first = options.batch * options.accumulate * setup_.world->size();
  return plan_batch(scheduled_batch(schedule_, first, step_), options.batch, setup_.world->size());
}

void TrainJob::run_step(bool want_stop, bool& stop) {
  const auto began_at = setup_.clock->now();
  const auto& options = setup_.options;
  auto& parameters = *setup_.model.parameters;
  auto& world = *setup_.world;
  world.set_step(step_ + 1);
  set_training(true);

  const auto plan = batch_plan();
  at::Tensor mean; // of this rank's losses
  at::Tensor loss;
  for (std::int64_t micro = 0; micro < plan.accumulate; ++micro) {
    const auto batch = data::make_batch(
        *setup_.corpus, data::Split::kTrain, order_.next(plan.micro_batch, world.rank(), world.size()));
    loss = setup_.model.loss(batch.tokens_BT.to(device_), batch.targets_BT.to(device_));
    if (plan.accumulate > 1) {
      loss = loss / plan.accumulate;
    }
    mean = mean.defined() ? mean + loss.detach() : loss.detach();
    if (micro + 1 < plan.accumulate) {
      const auto scope = parameters.no_sync();
      loss.backward();
    }
  }

  // The ranks' losses, and whether anybody wants to stop: ranks see signals and clocks at different steps, and one that
  // left alone would leave the others waiting. Under way while backward runs.
  const bool asked = stop_asked_.load(std::memory_order_relaxed);
  const auto votes = at::tensor({asked ? 1.0 : 0.0, want_stop ? 1.0 : 0.0}, at::kDouble).to(device_);
  const auto shared = at::cat({mean.to(at::kDouble).reshape({1}), votes});
  const auto work = world.all_reduce(shared, comm::ReduceOp::kSum, world.size(), "loss");
  loss.backward();
  work->wait();
  const auto agreed = shared.cpu();
  const double mean_loss = agreed[0].item<double>();
  stop_agreed_ = agreed[1].item<double>() > 0;
  stop = stop_agreed_ || agreed[2].item<double>() > 0;
  TORCH_CHECK(
      std::isfinite(mean_loss), "[TrainJob] the loss is ", mean_loss, " at step ", step_ + 1,
      "; lower the learning rate, lengthen the warm-up, or clip gradients");

  const double rate = learning_rate(options, step_);
  const double norm = parameters.clip_grad_norm_(options.clip > 0 ? options.clip : kInfinity);
  optimizer_->step(rate);
  parameters.zero_grad();
  ++step_;

  StepInfo info;
  info.step = step_;
  info.samples = plan.global_batch;
  info.tokens = info.samples * setup_.corpus->options().context;
  info.flops = (6.0 * static_cast<double>(parameters.num_parameters()) + setup_.model.attention_flops_per_token) *
               static_cast<double>(info.tokens / world.size());
  info.seconds = seconds_between(began_at, setup_.clock->now());
  info.metrics = {{"loss", mean_loss}, {"grad_norm", norm}, {"lr", rate}};
  report(info);
}

bool TrainJob::agree_to_stop() {
  const double asked = stop_asked_.load(std::memory_order_relaxed) ? 1 : 0;
  const auto any = at::full({1}, asked, at::TensorOptions(at::kDouble).device(device_));
  setup_.world->all_reduce(any, comm::ReduceOp::kMax, 1, "stop")->wait();
  stop_agreed_ = stop_agreed_ || any.item<double>() > 0;
  return stop_agreed_;
}

void TrainJob::report(const StepInfo& measured) {
  auto info = measured;
  info.metrics["peak_memory_bytes"] = static_cast<double>(peak_memory_bytes());
  if (info.seconds > 0) {
    info.metrics["tokens_per_second"] = static_cast<double>(info.tokens) / info.seconds;
    info.metrics["tflops"] = info.flops / info.seconds * 1e-12;
  }
  totals_.tokens += info.tokens;
  totals_.step_seconds += info.seconds;
  totals_.flops += info.flops;
  for (const auto& [name, value] : info.metrics) {
    metrics_[name] = value;
  }
  tell([&](Observer& observer) { observer.on_step(info); });
  tell([&](Observer& observer) { observer.on_samples(info.samples); });
}

void TrainJob::evaluate_and_sample_when_due() {
  if (stop_agreed_) {
    return;
  }
  const auto& options = setup_.options;
  const auto due = [&](std::int64_t every) { return step_ == options.steps || (every > 0 && step_ % every == 0); };
  if (due(options.eval_every) && setup_.corpus->num_windows(data::Split::kValidation) > 0) {
    const double loss = evaluate();
    if (stop_agreed_) {
      return; // in the middle of it
    }
    const std::map<std::string, double> result{{"eval/loss", loss}};
    metrics_["eval/loss"] = result.at("eval/loss");
    tell([&](Observer& observer) { observer.on_metrics(step_, result); });
  }
  if (due(options.sample_every) && options.sample_length > 0 && setup_.model.logits) {
    const auto text = sample();
    tell([&](Observer& observer) { observer.on_text(step_, "sample", text); });
  }
}

double TrainJob::evaluate() {
  const at::NoGradGuard no_grad;
  set_training(false);
  const auto& options = setup_.options;
  auto& world = *setup_.world;
  const auto available = setup_.corpus->num_windows(data::Split::kValidation);
  if (available == 0) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  const auto global_batch = options.batch * world.size();
  const auto count = options.eval_batches == 0 ? available : std::min(available, options.eval_batches * global_batch);
  double sum = 0;
  for (std::int64_t first = 0; first < count; first += global_batch) {
    if (first / global_batch % kBatchesBetweenStops == kBatchesBetweenStops - 1 && agree_to_stop()) {
      return std::numeric_limits<double>::quiet_NaN();
    }
    const auto begin = first + options.batch * world.rank();
    const auto end = std::min(begin + options.batch, count);
    std::vector<std::int64_t> indices;
    for (std::int64_t i = begin; i < end; ++i) {
      indices.push_back(i * available / count); // evenly spread
    }
    const auto weight = static_cast<double>(indices.size());
    if (indices.empty()) {
      indices.push_back(0); // A forward is collective: this rank takes part with a window that does not count.
    }
    const auto batch = data::make_batch(*setup_.corpus, data::Split::kValidation, indices);
    sum += weight * setup_.model.loss(batch.tokens_BT.to(device_), batch.targets_BT.to(device_)).item<double>();
  }
  const auto total = at::full({1}, sum, at::TensorOptions(at::kDouble).device(device_));
  world.all_reduce(total, comm::ReduceOp::kSum, static_cast<double>(count), "evaluation loss")->wait();
  return total.item<double>();
}

std::string TrainJob::sample() {
  TORCH_CHECK_VALUE(
      setup_.model.logits, "[TrainJob::sample] the model has no logits function; give TrainableModel one");
  set_training(false);
  const auto& options = setup_.options;
  return sample_text(
      setup_.model.logits,
      {.length = options.sample_length,
       .context = setup_.corpus->options().context,
       .temperature = options.temperature,
       .top_k = options.top_k,
       .prompt = options.prompt,
       .stop = [this] { return agree_to_stop(); }},
      Rng(static_cast<std::uint64_t>(options.seed)).fork("sample").fork(std::to_string(step_)), device_);
}

std::shared_ptr<const JobState> TrainJob::pause() {
  auto state = std::make_shared<TrainState>();
  state->made_by = describe(setup_);
  state->steps_done = step_;
  state->totals = totals_;
  state->metrics = metrics_;
  state->cursor = order_.cursor();
  state->parameters = copies_of(setup_.model.parameters->named());
  state->buffers = copies_of(setup_.model.buffers);
  state->optimizer = optimizer_->save();
  state->generators = generator_states(device_);
  return state;
}

void TrainJob::resume(const std::shared_ptr<const JobState>& state) {
  const auto paused = std::dynamic_pointer_cast<const TrainState>(state);
  if (!paused) {
    EBB_THROW(
        IncompatibleStateError,
        "[TrainJob::resume] expected the state of a paused TrainJob, got that of another job or none");
  }
  TORCH_CHECK_VALUE(!ended_, "[TrainJob::resume] this job has ended; resume into a new one");
  check_compatible(*paused, setup_);
  optimizer_->load(paused->optimizer);
  copy_into(setup_.model.parameters->named(), paused->parameters);
  copy_into(setup_.model.buffers, paused->buffers);
  set_generator_states(device_, paused->generators);
  order_.seek(paused->cursor);
  step_ = paused->steps_done;
  totals_ = paused->totals;
  metrics_ = paused->metrics;
}

void TrainJob::resize(int world_size) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "[TrainJob::resize] cannot go on with ", world_size,
      " ranks: shards do not move between ranks yet; start a new job with ", world_size, " ranks");
}

void TrainJob::stop() {
  end("stopped");
}

void TrainJob::end(const std::string& why) {
  if (!ended_) {
    ended_ = true;
    if (begun_) {
      tell([&](Observer& observer) { observer.on_run_end(why); });
    }
  }
}

JobStatus TrainJob::status() const {
  return {.step = step_, .finished = ended_, .metrics = metrics_};
}

void TrainJob::set_training(bool training) {
  if (training_ != training && setup_.model.set_training) {
    setup_.model.set_training(training);
  }
  training_ = training;
}

} // namespace ebb::train
