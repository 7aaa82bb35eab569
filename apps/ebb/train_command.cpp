#include "config_file.h"
#include "dry_run.h"
#include "option_flags.h"
#include "run_directory.h"
#include "subcommand.h"
#include "train_model.h"
#include "train_options.h"
#include "train_run.h"

#include "ebb/base/error.h"
#include "ebb/base/log.h"
#include "ebb/comm/init.h"
#include "ebb/comm/launch.h"
#include "ebb/data/byte_corpus.h"
#include "ebb/train/optimizer.h"

#include <torch/torch.h>

#include <filesystem>
#include <memory>

namespace ebb::app {
namespace {

struct TrainCommand {
  TrainCommandOptions options;
  OptionFlags flags;
  std::string config_file;
  bool trust_code = false;
  bool dry_run = false;
  std::vector<std::string> arguments;

  int run();
  void resolve_all(const comm::LaunchEnvironment& environment);
};

/// Fills in what follows from other options, and finds the mistakes that can be found before ranks are started: then
/// they are told once, not by every rank.
void TrainCommand::resolve_all(const comm::LaunchEnvironment& environment) {
  if (!config_file.empty()) {
    read_config_file(config_file, options);
  }
  flags.apply();
  resolve(options.model);
  check_trust(options.model, trust_code);
  check_options(options.train, "ebb train");
  TORCH_CHECK_VALUE(!options.data.data.empty(), "--data: expected at least one text file, got none; name one");
  options.train.min_lr = options.train.lowest_lr();
  TORCH_CHECK_VALUE(
      *options.train.min_lr <= options.train.lr, "--min-lr: expected at most the peak rate (", options.train.lr,
      "), got ", *options.train.min_lr);
  train::make_optimizer(options.train, {torch::zeros({1}).requires_grad_()});
  // config.toml is to be read from another folder.
  for (auto& path : options.data.data) {
    path = std::filesystem::absolute(path).lexically_normal().string();
  }
  if (!options.model.torchscript.empty()) {
    options.model.torchscript = std::filesystem::absolute(options.model.torchscript).lexically_normal().string();
  }
  const data::ByteCorpus corpus(
      {.files = options.data.data,
       .document_start = options.data.document_start,
       .context = *options.model.context,
       .validation_fraction = options.data.validation_fraction});
  const int world_size =
      environment.launcher == "none" ? static_cast<int>(options.parallel.nproc) : environment.world_size;
  check_parallel(options.parallel, world_size);
  if (!dry_run) {
    check_size(options.model, options.parallel, world_size);
  }
}

int TrainCommand::run() {
  const auto environment = comm::launch_environment();
  resolve_all(environment);
  if (dry_run) {
    return run_dry(options, trust_code);
  }
  if (environment.launcher == "none" && options.parallel.nproc > 1) {
    check_script(options.model, options.parallel);
    comm::init({}); // a group of one: reads what the environment says of groups
    log::set_rank(-1); // and the launcher is no rank
    check_run_directory(options.run.run_dir); // last, as it makes the folder
    auto argv = arguments;
    argv.front() = std::filesystem::read_symlink("/proc/self/exe").string();
    return comm::launch_local_ranks(static_cast<int>(options.parallel.nproc), argv);
  }
  TORCH_CHECK_VALUE(
      options.parallel.nproc == 1 || environment.launcher == "ebb", "--nproc starts ranks, but ", environment.launcher,
      " has started this one already; leave --nproc out");
  log::set_rank(environment.rank);
  return run_train(options, trust_code, environment);
}

} // namespace

std::function<int()> declare_train(CLI::App& command, const std::vector<std::string>& arguments) {
  const auto train = std::make_shared<TrainCommand>();
  train->arguments = arguments;
  command.add_option(
      "--config", train->config_file, "TOML file with any of these options, spelled with _ for -; flags win over it.");
  TrainCommandOptions::for_each_part(
      train->options, [&](const char* title, auto& part) { train->flags.add(command, title, part); });
  command.add_flag("--trust-code", train->trust_code, "Run the code in the TorchScript file.")->group("Model");
  command.add_flag(
      "--dry-run", train->dry_run,
      "Train nothing: print what one step of rank 0 would compute, send and keep in memory, on any number of ranks.");
  return [train] { return train->run(); };
}

} // namespace ebb::app
