#pragma once

#include "ebb/base/options.h"
#include "ebb/train/train_options.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

// What `ebb train` can be told, by flag and by configuration file. See Note [Options] in ebb/base/options.h.
namespace ebb::app {

struct ModelOptions {
  std::string preset = "tiny";
  std::optional<std::int64_t> layers = {};
  std::optional<std::int64_t> d_model = {};
  std::optional<std::int64_t> heads = {};
  std::optional<std::int64_t> context = {};
  std::optional<std::int64_t> vocab = {};
  std::string torchscript = {};

  template <class Visit>
  static void fields(Visit&& visit) {
    using O = ModelOptions;
    visit(
        "preset", &O::preset, "GPT of this size; the flags below change single sizes.",
        one_of({"tiny", "26m", "124m"}));
    visit("layers", &O::layers, "Blocks.", between(1, 10'000));
    visit("d_model", &O::d_model, "Width; a multiple of heads.", between(1, 1'000'000));
    visit("heads", &O::heads, "Attention heads.", between(1, 10'000));
    visit("context", &O::context, "Tokens the model sees at once.", between(1, 1'000'000));
    visit("vocab", &O::vocab, "Vocabulary; bytes need 256.", between(256, 10'000'000));
    visit(
        "torchscript", &O::torchscript,
        "Train this TorchScript file instead; its forward maps int64 tokens [B, T] to logits [B, T, V]. Needs "
        "--trust-code.",
        path());
  }
};

struct DataOptions {
  std::vector<std::string> data = {};
  std::vector<std::string> document_start = {};
  double validation_fraction = 0.1;

  template <class Visit>
  static void fields(Visit&& visit) {
    using O = DataOptions;
    visit("data", &O::data, "Text files.", path());
    visit(
        "document_start", &O::document_start,
        "Lines at which a new document begins; without any, each file is one document.", any_value());
    visit(
        "validation_fraction", &O::validation_fraction, "Kept from the end of each document for evaluation.",
        from_up_to(0, 1));
  }
};

struct ParallelOptions {
  std::int64_t nproc = 1;
  std::string strategy = "full_shard";
  std::int64_t replicas = 1;
  std::string precision = "fp32";
  std::string activations = "keep";
  std::string offload = "none";
  std::string offload_folder = "";
  std::string wrap = "auto";
  std::int64_t wrap_size = 1'000'000;
  std::int64_t frames = 2;
  std::int64_t prefetch = 1;

  template <class Visit>
  static void fields(Visit&& visit) {
    using O = ParallelOptions;
    visit(
        "nproc", &O::nproc,
        "Local ranks to start; 1 runs in this process, or as the rank that torchrun, srun or mpirun says.",
        between(1, 1024));
    visit(
        "strategy", &O::strategy, "What is spread over the ranks.",
        one_of({"full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2", "replicate"}));
    visit(
        "replicas", &O::replicas,
        "Copies of the sharded model (hybrid_shard, hybrid_shard_zero2). Divides the ranks; neighbours share a copy.",
        between(1, 1'000'000));
    visit(
        "precision", &O::precision,
        "bf16 gathers and computes in bfloat16, but for norms; parameters, sums of gradients and optimizer state stay "
        "float32.",
        one_of({"fp32", "bf16"}));
    visit(
        "activations", &O::activations,
        "What backward finds of a GPT block: keep, all that forward computed; recompute, the block's input alone "
        "(activation checkpointing); offload, the same with that input in a file until then.",
        one_of({"keep", "recompute", "offload"}));
    visit(
        "offload", &O::offload,
        "file: shards, their gradients and optimizer state live in a file that is mapped into memory.",
        one_of({"none", "file"}));
    visit(
        "offload_folder", &O::offload_folder,
        "For that file, which is gone with the run; a local disk. Empty: the system's temporary folder.", any_value());
    visit(
        "wrap", &O::wrap,
        "What is gathered together: block, each GPT block; size, modules of wrap_size; root, all at once; auto, block "
        "for a GPT and size for TorchScript.",
        one_of({"auto", "block", "size", "root"}));
    visit(
        "wrap_size", &O::wrap_size, "Parameters from which a module is a unit of its own (wrap size).",
        between(1, 1e15));
    visit("frames", &O::frames, "Buffers for gathered units.", between(1, 1000));
    visit("prefetch", &O::prefetch, "Units gathered ahead of their use.", between(0, 1000));
  }
};

struct RunOptions {
  std::string run_dir = "runs/train";
  std::optional<double> seconds = {};

  template <class Visit>
  static void fields(Visit&& visit) {
    using O = RunOptions;
    visit(
        "run_dir", &O::run_dir,
        "Where the run's files go: summary.json, config.toml, TensorBoard events. An earlier run's are replaced.",
        not_empty());
    visit("seconds", &O::seconds, "Stop training after so many seconds, whatever the steps.", above(0));
  }
};

/// All of it.
struct TrainCommandOptions {
  ModelOptions model;
  DataOptions data;
  train::TrainOptions train;
  ParallelOptions parallel;
  RunOptions run;

  /// Calls visit(title, options) for each part.
  template <class Self, class Visit>
  static void for_each_part(Self& self, Visit&& visit) {
    visit("Model", self.model);
    visit("Data", self.data);
    visit("Training", self.train);
    visit("Ranks", self.parallel);
    visit("Run", self.run);
  }
};

} // namespace ebb::app
