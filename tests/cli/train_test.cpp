#include "program.h"

#include <torch/script.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <csignal>
#include <cstring>
#include <thread>

// Trainings of a few steps by the real program, on one rank and on several.
namespace ebb::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

nlohmann::json train(const TemporaryFolder& folder, const std::string& run, const std::vector<std::string>& more) {
  const auto directory = folder.path() / run;
  const auto outcome = run_ebb(folder, tiny_training(write_text(folder), directory.string(), more));
  EXPECT_EQ(outcome.code, 0) << outcome.err << outcome.out;
  return read_json(directory / "summary.json");
}

TEST(Train, OneRankAndTwoComputeTheSameOnTheSameGlobalBatch) {
  const TemporaryFolder folder;
  const auto one = train(folder, "one", {"--batch", "4"});
  const auto two = train(folder, "two", {"--batch", "2", "--nproc", "2"});
  EXPECT_EQ(one["world_size"], 1);
  EXPECT_EQ(two["world_size"], 2);
  EXPECT_EQ(one["tokens"], 3 * 4 * 16);
  EXPECT_EQ(two["tokens"], one["tokens"]);
  // The mean of two means rounds otherwise than the mean of all.
  EXPECT_NEAR(one["train_loss"], two["train_loss"], 2e-6);
  EXPECT_NEAR(one["eval_loss"], two["eval_loss"], 2e-6);
  EXPECT_NEAR(one["train_loss"], std::log(256.0), 0.3);
}

class Strategies : public ::testing::TestWithParam<const char*> {};

TEST_P(Strategies, TrainAlike) {
  const TemporaryFolder folder;
  const auto reference = train(folder, "reference", {"--batch", "2", "--nproc", "2"});
  const auto other = train(folder, "other", {"--batch", "2", "--nproc", "2", "--strategy", GetParam()});
  EXPECT_EQ(other["strategy"], GetParam());
  EXPECT_NEAR(other["train_loss"], reference["train_loss"], 2e-6);
  EXPECT_NEAR(other["eval_loss"], reference["eval_loss"], 2e-6);
}

INSTANTIATE_TEST_SUITE_P(
    All, Strategies, ::testing::Values("shard_grad_op", "no_shard", "replicate"),
    [](const auto& info) { return std::string(info.param); });

TEST(Train, CopiesOfShardsAndAccumulationComputeTheSameOnTheSameGlobalBatch) {
  const TemporaryFolder folder;
  const auto one = train(folder, "one", {"--batch", "8", "--eval-batches", "0"});
  const auto four = train(
      folder, "four",
      {"--batch", "1", "--accumulate", "2", "--nproc", "4", "--strategy", "hybrid_shard", "--replicas", "2",
       "--eval-batches", "0"});
  EXPECT_EQ(four["tokens"], one["tokens"]);
  EXPECT_NEAR(four["train_loss"], one["train_loss"], 2e-6);
  EXPECT_NEAR(four["eval_loss"], one["eval_loss"], 2e-6);
  EXPECT_NEAR(four["shard_bytes_per_rank"][0].get<double>(), one["shard_bytes_per_rank"][0].get<double>() / 2, 1024);
}

TEST(Train, FollowsABatchScheduleAndWritesItDown) {
  const TemporaryFolder folder;
  const auto one = train(folder, "one", {"--batch", "8", "--batch-schedule", "1:8", "2:16", "--eval-batches", "0"});
  EXPECT_EQ(one["tokens"], (8 + 8 + 16) * 16);
  const auto config = (folder.path() / "one" / "config.toml").string();
  const auto two = train(
      folder, "two", {"--config", config, "--batch", "1", "--accumulate", "4", "--nproc", "2", "--eval-batches", "0"});
  EXPECT_EQ(two["tokens"], one["tokens"]);
  EXPECT_NEAR(two["train_loss"], one["train_loss"], 2e-6);
  EXPECT_NEAR(two["eval_loss"], one["eval_loss"], 2e-6);
  const auto outcome = run_ebb(
      folder, tiny_training(
                  write_text(folder), (folder.path() / "three").string(), {"--nproc", "2", "--batch-schedule", "1:5"}));
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.err, HasSubstr("2 rank(s) can share equally, got 5"));
}

TEST(Train, ComputesInBfloat16AndKeepsFloatParameters) {
  const TemporaryFolder folder;
  const auto fp32 = train(folder, "fp32", {"--nproc", "2"});
  const auto bf16 = train(folder, "bf16", {"--nproc", "2", "--precision", "bf16"});
  EXPECT_NEAR(bf16["train_loss"], fp32["train_loss"], 2e-2);
  EXPECT_NE(bf16["train_loss"], fp32["train_loss"]);
  EXPECT_EQ(bf16["shard_bytes_per_rank"], fp32["shard_bytes_per_rank"]);
}

TEST(Train, RecomputesAndOffloadsActivationsAndShardsWithoutChangingTheRun) {
  const TemporaryFolder folder;
  const auto tier = folder.path() / "tier";
  std::filesystem::create_directory(tier);
  const auto kept = train(folder, "kept", {"--nproc", "2"});
  const auto run = [&](const std::string& name, std::vector<std::string> more) {
    more.insert(more.end(), {"--nproc", "2"});
    const auto summary = train(folder, name, more);
    EXPECT_NEAR(summary["train_loss"], kept["train_loss"], 1e-6) << name;
    EXPECT_NEAR(summary["eval_loss"], kept["eval_loss"], 1e-6) << name;
  };
  run("recompute", {"--activations", "recompute"});
  run("offload", {"--activations", "offload", "--offload-folder", tier.string()});
  run("file", {"--offload", "file", "--offload-folder", tier.string()});
  EXPECT_TRUE(std::filesystem::is_empty(tier));
  const auto missing = (folder.path() / "missing").string();
  const auto outcome = run_ebb(
      folder,
      tiny_training(
          write_text(folder), (folder.path() / "gone").string(), {"--offload", "file", "--offload-folder", missing}));
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.err, HasSubstr("cannot make a file in '" + missing + "'"));
}

TEST(Train, DryRunSaysWhatAStepOnManyRanksTakesAndLeavesNothing) {
  const TemporaryFolder folder;
  const auto directory = folder.path() / "run";
  const auto dry = [&](const std::vector<std::string>& more) {
    auto arguments = tiny_training(write_text(folder), directory.string(), more);
    arguments.emplace_back("--dry-run");
    const auto outcome = run_ebb(folder, arguments);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome.out;
  };
  // Six times each weight of the products for each of 2 x 16 tokens, and attention: 2 layers of width 32.
  const std::int64_t products = 2 * 12 * 32 * 32 + 256 * 32;
  const std::int64_t flops = 6 * 32 * products + 2 * 14 * 2 * 16 * 16 * 32;
  const auto text = dry({"--batch", "2", "--nproc", "512"});
  EXPECT_THAT(
      text,
      AllOf(
          HasSubstr("rank 0 of 512"), HasSubstr(std::to_string(flops / 10'000).insert(1, ".") + " MFLOP on this rank"),
          HasSubstr("16384 tokens on all"), HasSubstr("over 512 ranks")));
  // A model of 175 billion parameters, of which this machine could hold none.
  const std::int64_t d = 12288;
  const std::int64_t parameters = 50257 * d + 16 * d + 96 * (12 * d * d + 13 * d) + 2 * d;
  EXPECT_THAT(
      dry({"--layers", "96", "--d-model", "12288", "--heads", "96", "--vocab", "50257", "--nproc", "1024"}),
      AllOf(HasSubstr(std::to_string(parameters)), HasSubstr("this rank keeps 682 MB")));
  EXPECT_FALSE(std::filesystem::exists(directory));
}

TEST(Train, SaysInItsSummaryWhatTheRunCameTo) {
  const TemporaryFolder folder;
  const auto summary = train(folder, "run", {"--batch", "2", "--nproc", "2", "--sample-length", "60"});
  EXPECT_EQ(summary["outcome"], "done");
  EXPECT_EQ(summary["steps"], 3);
  EXPECT_EQ(summary["strategy"], "full_shard");
  const std::int64_t parameters = 256 * 32 + 16 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32;
  EXPECT_EQ(summary["parameters"], parameters);
  ASSERT_EQ(summary["shard_bytes_per_rank"].size(), 2u);
  for (const auto& bytes : summary["shard_bytes_per_rank"]) {
    EXPECT_GE(bytes, parameters * 4 / 2);
    EXPECT_LE(bytes, parameters * 4 / 2 + 1024); // alignment
  }
  ASSERT_EQ(summary["peak_memory_bytes_per_rank"].size(), 2u);
  EXPECT_GT(summary["peak_memory_bytes_per_rank"][1], 10'000'000);
  EXPECT_GT(summary["grad_norm"], 0);
  EXPECT_LT(summary["grad_norm"], 100);
  EXPECT_GT(summary["seconds"], 0);
  EXPECT_GT(summary["tokens_per_second"], 0);
  EXPECT_EQ(summary["sample"].get<std::string>().size(), 60u);
  EXPECT_LE(summary["sample_words_in_corpus"], summary["sample_words"]);
}

TEST(Train, ReplicateKeepsWholeParametersOnEveryRank) {
  const TemporaryFolder folder;
  const auto summary = train(folder, "run", {"--nproc", "2", "--strategy", "replicate", "--sample-length", "0"});
  EXPECT_EQ(summary["shard_bytes_per_rank"][0], 4 * summary["parameters"].get<std::int64_t>());
  EXPECT_FALSE(summary.contains("sample"));
}

TEST(Train, RunsAgainFromTheConfigItLeft) {
  const TemporaryFolder folder;
  const auto first = train(folder, "first", {"--batch", "2", "--seed", "7", "--lr", "0.0123", "--prompt", "a \"b\"\n"});
  const auto config = (folder.path() / "first" / "config.toml").string();
  const auto second_dir = folder.path() / "second";
  // From another folder, with one flag over the file.
  const auto outcome = run_ebb(folder, {"train", "--config", config, "--run-dir", second_dir.string()});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const auto second = read_json(second_dir / "summary.json");
  EXPECT_EQ(second["train_loss"], first["train_loss"]);
  EXPECT_EQ(second["eval_loss"], first["eval_loss"]);
  EXPECT_EQ(second["sample"], first["sample"]);
  auto expected = read_file(config);
  const auto at = expected.find("/first'");
  ASSERT_NE(at, std::string::npos) << expected;
  expected.replace(at, 7, "/second'");
  EXPECT_EQ(read_file(second_dir / "config.toml"), expected);
}

TEST(Train, EndsAtATenthOfTheRateUnlessToldOtherwise) {
  const TemporaryFolder folder;
  train(folder, "run", {"--lr", "1e-5"});
  EXPECT_THAT(read_file(folder.path() / "run" / "config.toml"), HasSubstr("\nmin_lr = 1.0000000000000002e-06\n"));
  train(folder, "given", {"--lr", "1e-5", "--min-lr", "0"});
  EXPECT_THAT(read_file(folder.path() / "given" / "config.toml"), HasSubstr("\nmin_lr = 0.0\n"));
}

TEST(Train, FlagsWinOverTheFileAndItsPathsStartAtItsFolder) {
  const TemporaryFolder folder;
  std::filesystem::create_directories(folder.path() / "configs" / "data");
  write_text(folder, "configs/data/text.txt");
  const auto config = folder.write(
      "configs/my.toml",
      "data = [\"data/text.txt\"]\nlayers = 1\nd_model = 32\nheads = 2\ncontext = 16\nsteps = 5\nseed = 9\n");
  const auto run = folder.path() / "run";
  const auto outcome =
      run_ebb(folder, {"train", "--config", config, "--steps", "2", "--sample-length", "0", "--run-dir", run.string()});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(read_json(run / "summary.json")["steps"], 2);
  EXPECT_THAT(
      read_file(run / "config.toml"),
      AllOf(HasSubstr("seed = 9"), HasSubstr("steps = 2"), HasSubstr("configs/data/text.txt")));
}

TEST(Train, ReplacesAnEarlierRunInItsFolderAndNothingElse) {
  const TemporaryFolder folder;
  std::filesystem::create_directories(folder.path() / "run");
  folder.write("run/events.out.tfevents.1.2.ebb", "old");
  folder.write("run/events.out.tfevents.1.2.other", "not ebb's");
  folder.write("run/notes.txt", "mine");
  train(folder, "run", {});
  int events = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path() / "run")) {
    events += entry.path().filename().string().ends_with(".ebb") ? 1 : 0;
  }
  EXPECT_EQ(events, 1);
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "run/events.out.tfevents.1.2.ebb"));
  EXPECT_EQ(read_file(folder.path() / "run/events.out.tfevents.1.2.other"), "not ebb's");
  EXPECT_EQ(read_file(folder.path() / "run/notes.txt"), "mine");
}

TEST(Train, EndsWhenItsTimeIsUsed) {
  const TemporaryFolder folder;
  const auto summary = train(folder, "run", {"--nproc", "2", "--steps", "100000000", "--seconds", "0.2"});
  EXPECT_EQ(summary["outcome"], "out of time");
  EXPECT_LT(summary["steps"], 100000000);
  EXPECT_TRUE(summary.contains("eval_loss"));
  EXPECT_EQ(summary["sample"].get<std::string>().size(), 20u);
}

class StopsAt : public ::testing::TestWithParam<int> {};

TEST_P(StopsAt, TheEndOfAStepOnASignalAndWritesItsSummary) {
  const TemporaryFolder folder;
  const auto run = folder.path() / "run";
  Ebb ebb(
      folder,
      tiny_training(write_text(folder), run.string(), {"--nproc", std::to_string(GetParam()), "--steps", "100000000"}));
  // The header is printed once everything is set up; training follows at once.
  ASSERT_TRUE(Ebb::wait_for_file(folder.path() / "stdout.txt"));
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  ebb.signal(SIGTERM);
  const auto outcome = ebb.wait();
  EXPECT_EQ(outcome.code, 1) << outcome.err; // not 5: nothing was saved
  EXPECT_THAT(
      outcome.err, AllOf(
                       HasSubstr("stopped by signal 15 after step"), HasSubstr("not saved"), Not(HasSubstr("[error]")),
                       Not(HasSubstr("failed"))));
  const auto summary = read_json(run / "summary.json");
  EXPECT_EQ(summary["outcome"], "stopped by signal 15");
  EXPECT_GE(summary["steps"], 1);
  EXPECT_EQ(summary["world_size"], GetParam());
}

TEST(Train, FailsWhereTheDiskIsFull) {
  const TemporaryFolder folder;
  const auto data = write_text(folder);
  const auto run = folder.path() / "run";
  std::filesystem::create_directories(run);
  std::filesystem::create_symlink("/dev/full", run / "config.toml"); // from the start
  for (const std::string nproc : {"1", "2"}) {
    const auto outcome = run_ebb(folder, tiny_training(data, run.string(), {"--nproc", nproc}));
    EXPECT_EQ(outcome.code, 1) << outcome.err;
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("config.toml"), HasSubstr("make room")));
  }
  std::filesystem::remove(run / "config.toml");
  for (const std::string nproc : {"1", "2"}) { // at the end
    Ebb ebb(folder, tiny_training(data, run.string(), {"--nproc", nproc, "--steps", "100000000", "--seconds", "1"}));
    ASSERT_TRUE(Ebb::wait_for_file(folder.path() / "stdout.txt"));
    std::filesystem::create_symlink("/dev/full", run / "summary.json");
    const auto outcome = ebb.wait();
    EXPECT_EQ(outcome.code, 1) << outcome.err;
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("summary.json"), HasSubstr("make room")));
    if (nproc == "2") {
      EXPECT_THAT(outcome.err, HasSubstr("ebb: rank 0: "));
    }
    std::filesystem::remove(run / "summary.json");
  }
}

TEST(Train, NamesTheRankThatReportsALostPeer) {
  const TemporaryFolder folder;
  Ebb ebb(
      folder,
      tiny_training(write_text(folder), (folder.path() / "run").string(), {"--nproc", "2", "--steps", "100000000"}));
  ASSERT_TRUE(Ebb::wait_for_file(folder.path() / "stdout.txt"));
  ebb.kill_child();
  const auto outcome = ebb.wait();
  EXPECT_EQ(outcome.code, 128 + SIGKILL) << outcome.err;
  EXPECT_THAT(outcome.err, ::testing::ContainsRegex("ebb: rank [01]: "));
  EXPECT_THAT(outcome.err, ::testing::ContainsRegex("\\[error\\] rank [01] failed")) << "the launcher is no rank";
}

INSTANTIATE_TEST_SUITE_P(Ranks, StopsAt, ::testing::Values(1, 2));

/// The scalars of an event file, read without its checksums: those are tested where the file is written.
std::size_t count_of(const std::string& bytes, const std::string& text) {
  std::size_t count = 0;
  for (auto at = bytes.find(text); at != std::string::npos; at = bytes.find(text, at + 1)) {
    ++count;
  }
  return count;
}

TEST(Train, WritesAnEventFileWithACurveForEveryMetric) {
  const TemporaryFolder folder;
  train(folder, "run", {"--eval-every", "1"});
  std::string bytes;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path() / "run")) {
    if (entry.path().filename().string().starts_with("events.out.tfevents.")) {
      bytes = read_file(entry.path());
    }
  }
  // The records: length, checksum, payload, checksum.
  std::size_t records = 0;
  for (std::size_t at = 0; at < bytes.size();) {
    std::uint64_t length = 0;
    ASSERT_LE(at + 12, bytes.size());
    std::memcpy(&length, bytes.data() + at, sizeof(length));
    at += 12 + length + 4;
    ASSERT_LE(at, bytes.size());
    ++records;
  }
  EXPECT_EQ(records, 1u + 3 + 3 + 1); // version, steps, evaluations, sample
  EXPECT_EQ(count_of(bytes, "brain.Event:2"), 1u);
  for (const std::string tag :
       {"train/loss", "train/grad_norm", "train/lr", "train/tokens_per_second", "train/tflops", "eval/loss"}) {
    EXPECT_EQ(count_of(bytes, tag), 3u) << tag;
  }
}

/// A language model with layers that keep state besides parameters, written as a TorchScript archive.
std::string write_script_model(const TemporaryFolder& folder) {
  torch::manual_seed(3);
  torch::jit::Module model("LanguageModel");
  model.register_parameter("embedding", (torch::randn({256, 12}) * 0.1).requires_grad_(), /*is_buffer=*/false);
  model.register_parameter("mix", (torch::randn({12, 12}) * 0.3).requires_grad_(), false);
  model.register_parameter("bias", torch::zeros({12}, torch::requires_grad()), false);
  model.register_buffer("scale", torch::ones({1}));
  model.define(R"(
    def forward(self, tokens):
        x = self.embedding[tokens]
        x = torch.tanh(torch.matmul(x, self.mix) + self.bias) * self.scale
        return torch.matmul(x, self.embedding.t())
  )");
  const auto path = (folder.path() / "model.pt").string();
  model.save(path);
  return path;
}

TEST(TorchScript, TrainsShardedAsItDoesOnOneRank) {
  const TemporaryFolder folder;
  const auto model = write_script_model(folder);
  const auto data = write_text(folder);
  const auto run = [&](const std::string& name, const std::vector<std::string>& more) {
    const auto directory = folder.path() / name;
    std::vector<std::string> arguments{
        "train",
        "--torchscript",
        model,
        "--trust-code",
        "--data",
        data,
        "--context",
        "16",
        "--steps",
        "20",
        "--lr",
        "0.05",
        "--min-lr",
        "0.01",
        "--warmup",
        "2",
        "--eval-batches",
        "4",
        "--sample-length",
        "8",
        "--wrap-size",
        "100",
        "--run-dir",
        directory.string()};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const auto outcome = run_ebb(folder, arguments);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return read_json(directory / "summary.json");
  };
  const auto one = run("one", {"--batch", "4"});
  const auto two = run("two", {"--batch", "2", "--nproc", "2"});
  EXPECT_EQ(one["parameters"], 256 * 12 + 12 * 12 + 12);
  EXPECT_NEAR(one["eval_loss"], two["eval_loss"], 2e-5);
  EXPECT_LT(one["eval_loss"], 0.9 * std::log(256.0));
  EXPECT_EQ(one["sample"], two["sample"]);
}

TEST(TorchScript, NamesAModelWhoseLogitsDoNotFit) {
  const TemporaryFolder folder;
  torch::jit::Module model("Small");
  model.register_parameter("weight", torch::zeros({256}, torch::requires_grad()), false);
  model.define("def forward(self, tokens):\n    return self.weight[tokens]\n");
  const auto path = (folder.path() / "model.pt").string();
  model.save(path);
  const auto outcome = run_ebb(
      folder, {"train", "--torchscript", path, "--trust-code", "--data", write_text(folder), "--context", "16",
               "--run-dir", (folder.path() / "run").string()});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.err, HasSubstr("expected logits [8, 16, vocabulary], got [8, 16]"));
}

} // namespace
} // namespace ebb::test
