#include "train_run.h"

#include "config_file.h"
#include "run_directory.h"
#include "run_summary.h"
#include "stop_signals.h"
#include "train_model.h"

#include "ebb/base/error.h"
#include "ebb/base/log.h"
#include "ebb/train/console_observer.h"
#include "ebb/train/memory.h"
#include "ebb/train/sampling.h"
#include "ebb/train/tensorboard_observer.h"

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include <deque>
#include <filesystem>
#include <iostream>
#include <numeric>

namespace ebb::app {
namespace {

namespace fs = std::filesystem;

/// A metric of the newest steps.
class NewestValues {
 public:
  void add(const StepInfo& info, const std::string& name) {
    if (const auto found = info.metrics.find(name); found != info.metrics.end()) {
      values_.push_back(found->second);
      if (values_.size() > kNewest) {
        values_.pop_front();
      }
    }
  }
  std::optional<double> mean() const {
    const double sum = std::accumulate(values_.begin(), values_.end(), 0.0);
    return values_.empty() ? std::nullopt : std::optional(sum / static_cast<double>(values_.size()));
  }

 private:
  static constexpr std::size_t kNewest = 100;
  std::deque<double> values_;
};

/// Keeps what the summary needs: metrics of the newest steps and the last sample.
class SummaryObserver final : public Observer {
 public:
  void on_step(const StepInfo& info) override {
    loss.add(info, "loss");
    grad_norm.add(info, "grad_norm");
  }
  void on_metrics(std::int64_t step, const std::map<std::string, double>& metrics) override {
    if (const auto found = metrics.find("eval/loss"); found != metrics.end()) {
      eval_loss = found->second;
      eval_step = step;
    }
  }
  void on_text(std::int64_t, const std::string&, const std::string& text) override {
    sample = text;
  }
  NewestValues loss;
  NewestValues grad_norm;
  std::optional<double> eval_loss;
  std::int64_t eval_step = 0;
  std::optional<std::string> sample;
};

std::string header(
    const TrainCommandOptions& options, const SpreadModel& spread, const data::ByteCorpus& corpus,
    const comm::Communicator& world) {
  const auto& parameters = *spread.model.parameters;
  auto text = fmt::format(
      "{}: {} parameters\n"
      "{} rank{} ({}), {}{}, {}: {:.2f} MB of parameters kept on rank 0\n"
      "{} document{}: {} bytes to train on, {} to validate\n"
      "{} steps of {} x {}{} sequences of {} bytes; files in {}\n",
      spread.description, parameters.num_parameters(), world.size(), world.size() == 1 ? "" : "s",
      world.capabilities().backend, options.parallel.strategy,
      options.parallel.replicas > 1 ? fmt::format(" in {} copies", options.parallel.replicas) : "",
      options.parallel.precision, static_cast<double>(parameters.bytes()) / 1e6, corpus.documents().size(),
      corpus.documents().size() == 1 ? "" : "s", corpus.num_bytes(data::Split::kTrain),
      corpus.num_bytes(data::Split::kValidation), options.train.steps, world.size(),
      options.train.accumulate > 1 ? fmt::format("{} x ", options.train.accumulate) : "", options.train.batch,
      *options.model.context, options.run.run_dir);
  for (const auto& stage : train::parse_batch_schedule(options.train.batch_schedule)) {
    text += fmt::format("from step {} on {} sequences a step on all ranks\n", stage.from, stage.global_batch);
  }
  text += parameters.explain();
  while (text.ends_with('\n')) {
    text.pop_back();
  }
  return text;
}

/// The signal that the first rank to have one got: the stop may have come to another rank than this. Collective.
int first_signal(comm::Communicator& world, int mine) {
  for (const auto& text : world.exchange(std::to_string(mine))) {
    if (text != "0") {
      return std::stoi(text);
    }
  }
  return 0;
}

std::vector<RankReport> gather_reports(comm::Communicator& world, const RankReport& mine) {
  const auto texts = world.exchange(nlohmann::json{mine.peak_memory_bytes, mine.parameter_bytes}.dump());
  std::vector<RankReport> reports;
  for (const auto& text : texts) {
    const auto json = nlohmann::json::parse(text);
    reports.push_back({json.at(0).get<std::int64_t>(), json.at(1).get<std::int64_t>()});
  }
  return reports;
}

int train(const TrainCommandOptions& options, bool trust_code, const std::shared_ptr<comm::Communicator>& world) {
  const bool first = world->rank() == 0;
  const auto corpus = std::make_shared<data::ByteCorpus>(data::ByteCorpusOptions{
      .files = options.data.data,
      .document_start = options.data.document_start,
      .context = *options.model.context,
      .validation_fraction = options.data.validation_fraction});
  const auto spread = make_model(options.model, options.parallel, options.train.seed, trust_code, world);

  const auto kept = std::make_shared<SummaryObserver>();
  std::vector<std::shared_ptr<Observer>> observers{kept};
  if (first) {
    check_run_directory(options.run.run_dir);
    clear_run_directory(options.run.run_dir);
    write_run_file(options.run.run_dir, "config.toml", config_text(options));
    observers.push_back(std::make_shared<train::TensorBoardObserver>(options.run.run_dir));
    observers.push_back(std::make_shared<train::ConsoleObserver>(std::cerr, std::cout));
    std::cout << header(options, spread, *corpus, *world) << "\n" << std::endl;
  }
  train::TrainJob job({
      .model = spread.model,
      .corpus = corpus,
      .world = world,
      .options = options.train,
      .observers = observers,
      .name = fs::path(options.run.run_dir).filename().string(),
      .directory = options.run.run_dir,
  });

  const StopSignals signals(job);
  const auto began_at = Clock::real().now();
  const auto status = job.advance({.steps = {}, .seconds = options.run.seconds});
  RunSummary summary;
  if (!status.finished && !job.stop_agreed()) { // out of time: end as a whole run does
    if (corpus->num_windows(data::Split::kValidation) > 0) {
      const auto loss = job.evaluate();
      if (!job.stop_agreed()) {
        kept->on_metrics(status.step, {{"eval/loss", loss}});
      }
    }
    if (options.train.sample_length > 0 && !job.stop_agreed()) {
      kept->sample = job.sample();
    }
  }
  const bool stopped = !status.finished && job.stop_agreed();
  summary.outcome = status.finished ? "done"
                    : stopped       ? fmt::format("stopped by signal {}", first_signal(*world, signals.received()))
                                    : "out of time";
  job.stop();

  summary.model = spread.description;
  summary.strategy = options.parallel.strategy;
  summary.backend = world->capabilities().backend;
  summary.steps = status.step;
  summary.planned_steps = options.train.steps;
  summary.num_parameters = spread.model.parameters->num_parameters();
  summary.ranks = gather_reports(*world, {train::peak_memory_bytes(), spread.model.parameters->bytes()});
  summary.train_loss = kept->loss.mean();
  summary.grad_norm = kept->grad_norm.mean();
  summary.eval_loss = kept->eval_loss;
  summary.eval_step = kept->eval_step;
  summary.tokens = job.totals().tokens;
  summary.seconds = seconds_between(began_at, Clock::real().now());
  summary.step_seconds = job.totals().step_seconds;
  summary.tflops_per_rank = summary.step_seconds > 0 ? job.totals().flops / summary.step_seconds * 1e-12 : 0;
  if (kept->sample) {
    summary.sample = train::printable(*kept->sample);
    summary.sample_words = data::count_known_words(*kept->sample, *corpus);
  }
  if (first) {
    write_run_file(options.run.run_dir, "summary.json", as_json(summary));
    std::cout << as_text(summary) << "  details          " << (fs::path(options.run.run_dir) / "summary.json").string()
              << std::endl;
  }
  world->barrier();
  if (stopped) {
    if (first) {
      std::cerr << "ebb: " << summary.outcome << " after step " << summary.steps
                << "; the training state was not saved, as checkpoints are not there yet" << std::endl;
    }
    return static_cast<int>(ExitCode::kFailure); // kPreempted would promise a saved state
  }
  return static_cast<int>(ExitCode::kDone);
}

} // namespace

int run_train(const TrainCommandOptions& options, bool trust_code, const comm::LaunchEnvironment& environment) {
  const auto world = comm::init(environment);
  try {
    return train(options, trust_code, world);
  } catch (...) {
    world->abort(); // The other ranks learn of it now, not at a timeout.
    throw;
  }
}

} // namespace ebb::app
