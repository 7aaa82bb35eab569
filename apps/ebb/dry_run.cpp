#include "dry_run.h"

#include "train_model.h"

#include "ebb/base/error.h"
#include "ebb/comm/dry_group.h"
#include "ebb/data/byte_corpus.h"
#include "ebb/shard/step_profiler.h"
#include "ebb/train/train_job.h"

#include <fmt/format.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <utility>
#include <vector>

namespace ebb::app {
namespace {

std::string quantity(double value, const char* unit) {
  static constexpr std::pair<double, const char*> kScales[] = {{1e18, "E"}, {1e15, "P"}, {1e12, "T"},
                                                               {1e9, "G"},  {1e6, "M"},  {1e3, "k"}};
  for (const auto& [scale, prefix] : kScales) {
    if (value >= scale) {
      return fmt::format("{:.3g} {}{}", value / scale, prefix, unit);
    }
  }
  return fmt::format("{:.0f} {}", value, unit);
}

std::string collectives_text(const std::vector<comm::CollectiveRecord>& records, std::int64_t sent) {
  struct Sum {
    std::int64_t calls = 0;
    std::int64_t bytes = 0;
  };
  std::map<std::pair<std::string, int>, Sum> sums; // by kind and size of the group
  for (const auto& record : records) {
    auto& sum = sums[{std::string(comm::name_of(record.op)), record.group_size}];
    ++sum.calls;
    sum.bytes += record.bytes;
  }
  auto text = fmt::format("  communication    {} sent by this rank\n", quantity(static_cast<double>(sent), "B"));
  for (const auto& [key, sum] : sums) {
    text += fmt::format(
        "    {:<14} {:>6} calls over {} ranks, {} given\n", key.first, sum.calls, key.second,
        quantity(static_cast<double>(sum.bytes), "B"));
  }
  return text;
}

std::string operators_text(const std::map<std::string, std::int64_t>& operators) {
  constexpr std::size_t kMost = 8;
  std::vector<std::pair<std::int64_t, std::string>> by_count;
  std::int64_t calls = 0;
  for (const auto& [name, count] : operators) {
    by_count.emplace_back(count, name);
    calls += count;
  }
  std::sort(by_count.rbegin(), by_count.rend());
  auto text = fmt::format("  operators        {} calls of {} kinds:", calls, operators.size());
  for (std::size_t i = 0; i < std::min(kMost, by_count.size()); ++i) {
    text += fmt::format("{} {} {}", i ? "," : "", by_count[i].second, by_count[i].first);
  }
  return text + (by_count.size() > kMost ? ", ...\n" : "\n");
}

} // namespace

int run_dry(const TrainCommandOptions& options, bool trust_code) {
  const auto corpus = std::make_shared<data::ByteCorpus>(data::ByteCorpusOptions{
      .files = options.data.data,
      .document_start = options.data.document_start,
      .context = *options.model.context,
      .validation_fraction = options.data.validation_fraction});
  const auto world = comm::dry_group(0, static_cast<int>(options.parallel.nproc));
  shard::StepProfiler profiler(shard::StepProfiler::Mode::kDry);
  const auto spread = make_model(options.model, options.parallel, options.train.seed, trust_code, world);
  auto train_options = options.train;
  train_options.steps = 3; // the first learns the order of units, the second is measured, and none is the last
  train_options.eval_every = train_options.sample_every = 0;
  train::TrainJob job({.model = spread.model, .corpus = corpus, .world = world, .options = train_options});
  job.advance({.steps = 1, .seconds = {}});
  comm::clear_dry_collectives(*world);
  profiler.begin();
  job.advance({.steps = 1, .seconds = {}});

  const auto profile = profiler.profile();
  const auto& parameters = *spread.model.parameters;
  const auto sequences = options.train.batch * options.train.accumulate;
  std::cout << fmt::format(
                   "dry run of one step of rank 0 of {}: {}, {}, {}\n"
                   "  parameters       {}, of which this rank keeps {}\n"
                   "  batch            {} x {} tokens on this rank, {} tokens on all\n"
                   "  compute          {} on this rank, {} on all\n"
                   "  memory           {} of tensors at the peak, {} between steps\n",
                   world->size(), spread.description, options.parallel.strategy, options.parallel.precision,
                   parameters.num_parameters(), quantity(static_cast<double>(parameters.bytes()), "B"), sequences,
                   corpus->options().context, sequences * corpus->options().context * world->size(),
                   quantity(static_cast<double>(profile.flops), "FLOP"),
                   quantity(static_cast<double>(profile.flops) * world->size(), "FLOP"),
                   quantity(static_cast<double>(profile.peak_live_bytes), "B"),
                   quantity(static_cast<double>(profile.live_bytes), "B"))
            << collectives_text(comm::dry_collectives(*world), comm::dry_bytes_sent(*world))
            << operators_text(profile.operators) << std::flush;
  return static_cast<int>(ExitCode::kDone);
}

} // namespace ebb::app
