#include "program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <cstdlib>
#include <sstream>

// What a user does wrong: each is one line on stderr that says what to do, and exit code 2; bad data is 3.
namespace ebb::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// Expects `code` and one line on stderr that holds all of `texts`.
void expect_refused(const Outcome& outcome, int code, const std::vector<std::string>& texts) {
  EXPECT_EQ(outcome.code, code) << outcome.err;
  EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  EXPECT_TRUE(outcome.err.starts_with("ebb: ")) << outcome.err;
  for (const auto& text : texts) {
    EXPECT_THAT(outcome.err, HasSubstr(text));
  }
}

TEST(Usage, HelpListsTheSubcommandsAndTheVersionIsPrinted) {
  const TemporaryFolder folder;
  const auto help = run_ebb(folder, {"--help"});
  EXPECT_EQ(help.code, 0);
  EXPECT_THAT(help.out, AllOf(HasSubstr("train"), HasSubstr("doctor"), HasSubstr("Exit codes: 0 done")));
  const auto version = run_ebb(folder, {"--version"});
  EXPECT_EQ(version.code, 0);
  EXPECT_THAT(version.out, ::testing::MatchesRegex("ebb [0-9]+\\.[0-9]+\\.[0-9]+\n"));
}

TEST(Usage, TrainHasExactlyTheFlagsOfTheList) {
  const TemporaryFolder folder;
  const auto help = run_ebb(folder, {"train", "--help"});
  EXPECT_EQ(help.code, 0);
  std::string flags;
  std::istringstream lines(help.out);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("  --")) {
      flags += line.substr(2, line.find(' ', 2) - 2) + "\n";
    }
  }
  // Scripts rely on these names: removing or renaming one needs a reason, adding one a line in the file.
  EXPECT_EQ(flags, read_file(EBB_FLAGS_FILE));
}

TEST(Usage, NeedsASubcommandAndKnowsNoOther) {
  const TemporaryFolder folder;
  expect_refused(run_ebb(folder, {}), 2, {"--help"});
  expect_refused(run_ebb(folder, {"trian"}), 2, {"trian"});
}

TEST(Usage, RefusesUnknownFlagsAndValuesOfTheWrongKind) {
  const TemporaryFolder folder;
  const auto data = write_text(folder);
  expect_refused(run_ebb(folder, {"train", "--data", data, "--stepz", "3"}), 2, {"--stepz"});
  expect_refused(run_ebb(folder, {"train", "--data", data, "--steps", "many"}), 2, {"--steps", "many"});
  expect_refused(run_ebb(folder, {"train", "--data", data, "--betas", "0.9"}), 2, {"--betas"});
}

TEST(Usage, RefusesValuesOutOfBoundsByFlag) {
  const TemporaryFolder folder;
  const auto data = write_text(folder);
  expect_refused(
      run_ebb(folder, {"train", "--data", data, "--steps", "0"}), 2, {"--steps", "in [1, 1000000000000]", "got 0"});
  expect_refused(run_ebb(folder, {"train", "--data", data, "--lr", "-1"}), 2, {"--lr", "above 0", "got -1"});
  expect_refused(
      run_ebb(folder, {"train", "--data", data, "--betas", "0.9", "1.5"}), 2, {"--betas", "in [0, 1)", "got 1.5"});
  expect_refused(
      run_ebb(folder, {"train", "--data", data, "--preset", "huge"}), 2, {"--preset", "tiny, 26m, 124m", "huge"});
  expect_refused(run_ebb(folder, {"train", "--data", data, "--strategy", "fsdp"}), 2, {"--strategy", "full_shard"});
  expect_refused(run_ebb(folder, {"train", "--data", data, "--nproc", "0"}), 2, {"--nproc", "got 0"});
  expect_refused(
      run_ebb(folder, {"train", "--data", data, "--d-model", "30", "--heads", "4"}), 2,
      {"--d-model", "multiple of heads (4)"});
  expect_refused(
      run_ebb(folder, {"train", "--data", data, "--lr", "1e-3", "--min-lr", "1e-2"}), 2, {"--min-lr", "0.001"});
  expect_refused(run_ebb(folder, {"train", "--data", data, "--prompt", ""}), 2, {"--prompt"});
  expect_refused(
      run_ebb(folder, {"train", "--data", data, "--nproc", "2", "--replicas", "2"}), 2,
      {"--replicas", "full_shard", "hybrid_shard"});
  expect_refused(
      run_ebb(folder, {"train", "--data", data, "--nproc", "4", "--strategy", "hybrid_shard", "--replicas", "3"}), 2,
      {"--replicas", "a divisor of the 4 ranks, got 3"});
  expect_refused(
      run_ebb(folder, {"train", "--data", data, "--strategy", "replicate", "--precision", "bf16"}), 2,
      {"--precision", "no_shard"});
  expect_refused(
      run_ebb(folder, {"train", "--data", data, "--strategy", "replicate", "--offload", "file"}), 2,
      {"--offload", "sharded strategy"});
  expect_refused(
      run_ebb(folder, {"train", "--data", data, "--offload-folder", folder.path().string()}), 2,
      {"--offload-folder", "--activations offload"});
}

TEST(Usage, RefusesNumbersThatNoNumberCanHold) {
  const TemporaryFolder folder;
  const auto data = write_text(folder);
  const auto huge = std::string(20, '9');
  // Every flag that takes a whole number, and every one that takes a number, as --help lists them.
  std::istringstream lines(run_ebb(folder, {"train", "--help"}).out);
  int whole = 0, real = 0;
  for (std::string line; std::getline(lines, line);) {
    const auto flag = line.starts_with("  --") ? line.substr(2, line.find(' ', 2) - 2) : "";
    const bool two = flag == "--betas";
    const auto refused = [&](const std::string& value, const std::string& text) {
      std::vector<std::string> arguments{"train", "--data", data, flag, value};
      arguments.insert(arguments.end(), two ? 1 : 0, "0.5");
      expect_refused(run_ebb(folder, arguments), 2, {flag, text, value});
    };
    if (!flag.empty() && line.find(" INT") != std::string::npos) {
      ++whole;
      refused(huge, "fits 64 bits");
    } else if (!flag.empty() && line.find(" FLOAT") != std::string::npos) {
      ++real;
      refused(real % 3 == 0 ? "1e400" : real % 3 == 1 ? "nan" : "inf", real % 3 == 0 ? "64 bits" : "a finite number");
    }
  }
  expect_refused(run_ebb(folder, {"train", "--data", data, "--steps", "2.5"}), 2, {"--steps", "a whole number", "2.5"});
  expect_refused(run_ebb(folder, {"train", "--data", data, "--lr", "1e-3x"}), 2, {"--lr", "a number", "1e-3x"});
  EXPECT_EQ(whole, 20);
  EXPECT_EQ(real, 9);
}

TEST(Usage, RefusesSizesThatNoMachineHas) {
  const TemporaryFolder folder;
  const auto data = write_text(folder);
  for (const std::string flag :
       {"--layers", "--d-model", "--heads", "--context", "--vocab", "--batch", "--frames", "--prefetch",
        "--eval-batches", "--accumulate", "--replicas", "--sample-length", "--steps", "--warmup", "--nproc"}) {
    expect_refused(
        run_ebb(folder, {"train", "--data", data, flag, "1000000000001"}), 2, {flag, "expected in [", "1000000000001"});
  }
  // 2^32 + 2 would be 2 after a cast to int.
  expect_refused(run_ebb(folder, {"train", "--data", data, "--frames", "4294967298"}), 2, {"--frames", "1000]"});
  expect_refused(
      run_ebb(folder, {"train", "--data", data, "--layers", "10000", "--d-model", "1000000", "--heads", "1"}), 2,
      {"--layers", "parameters", "this machine has"});
}

TEST(Usage, NamesMemoryThatIsMissingAndWhatNeedsLess) {
  const TemporaryFolder folder;
  const auto data = folder.write("text.txt", std::string(3'000'000, 'x'));
  // Logits of 10^6 x 10^6 x 256 floats: more than any address space.
  const auto outcome = run_ebb(
      folder, {"train", "--data", data, "--batch", "1000000", "--context", "1000000", "--d-model", "4", "--heads", "1",
               "--layers", "1", "--run-dir", (folder.path() / "run").string()});
  EXPECT_EQ(outcome.code, 1) << outcome.err;
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("ebb: not enough memory"), HasSubstr("smaller --batch")));
}

TEST(Usage, TellsEveryMistakeOnceHoweverManyRanksWereAskedFor) {
  const TemporaryFolder folder;
  const auto data = write_text(folder);
  const auto in_a_file = folder.write("afile", "no folder");
  const auto loop = (folder.path() / "loop").string();
  std::filesystem::create_symlink(loop, loop);
  std::filesystem::create_directories(folder.path() / "taken" / "config.toml");
  for (const std::string nproc : {"1", "2"}) {
    const auto refused = [&](const std::string& run_dir, int code, const std::vector<std::string>& texts,
                             const std::vector<std::string>& more = {}) {
      std::vector<std::string> arguments{"train", "--data", data, "--nproc", nproc, "--run-dir", run_dir};
      arguments.insert(arguments.end(), more.begin(), more.end());
      expect_refused(run_ebb(folder, arguments), code, texts);
    };
    const std::string remedy = "give another folder";
    refused(in_a_file, 2, {"--run-dir", "afile", remedy});
    refused(in_a_file + "/below", 2, {"--run-dir", "afile", remedy});
    refused(loop, 2, {"--run-dir", "loop", remedy});
    refused("/proc/nowhere", 2, {"--run-dir", "/proc/nowhere", remedy});
    refused((folder.path() / "taken").string(), 2, {"--run-dir", "config.toml", remedy});
    refused("", 2, {"--run-dir", "at least one byte"});
    const auto run = (folder.path() / "run").string();
    const auto model = folder.write("model.pt", "no archive");
    refused(run, 3, {"model.pt", "no TorchScript archive"}, {"--torchscript", model, "--trust-code"});
    refused(run, 2, {"--lr", "above 0"}, {"--lr", "0"});
    for (const char* name : {"EBB_TIMEOUT_MS", "EBB_HEARTBEAT_MS", "EBB_DEAD_AFTER_MS"}) {
      ::setenv(name, "soon", 1);
      refused(run, 2, {name, "soon"});
      ::unsetenv(name);
    }
  }
}

TEST(Usage, ExpectsAFolderThatCanBeListedAndWritten) {
  if (::geteuid() == 0) {
    GTEST_SKIP() << "the superuser may do everything";
  }
  const TemporaryFolder folder;
  const auto locked = folder.path() / "locked";
  std::filesystem::create_directories(locked);
  for (const auto permissions : {0000, 0300, 0500}) {
    std::filesystem::permissions(locked, static_cast<std::filesystem::perms>(permissions));
    for (const std::string nproc : {"1", "2"}) {
      const auto outcome =
          run_ebb(folder, {"train", "--data", write_text(folder), "--nproc", nproc, "--run-dir", locked.string()});
      expect_refused(outcome, 2, {"--run-dir", "locked", "Permission denied"});
    }
  }
  std::filesystem::permissions(locked, std::filesystem::perms::owner_all);
}

TEST(Usage, FailsWhereItsOutputIsLost) {
  const TemporaryFolder folder;
  for (const auto& arguments :
       std::vector<std::vector<std::string>>{{"--help"}, {"--version"}, {"doctor"}, {"doctor", "--json"}}) {
    const auto outcome = Ebb(folder, arguments, "/dev/full").wait();
    EXPECT_EQ(outcome.code, 1);
    EXPECT_THAT(outcome.err, HasSubstr("standard output could not be written")) << arguments.front();
  }
  for (const std::string nproc : {"1", "2"}) {
    const auto outcome =
        Ebb(folder, tiny_training(write_text(folder), (folder.path() / "run").string(), {"--nproc", nproc}),
            "/dev/full")
            .wait();
    EXPECT_EQ(outcome.code, 1);
    EXPECT_THAT(outcome.err, HasSubstr("standard output"));
    EXPECT_EQ(read_json(folder.path() / "run" / "summary.json")["outcome"], "done");
  }
}

TEST(Usage, RefusesLbfgsByNameAndSaysWhy) {
  const TemporaryFolder folder;
  expect_refused(
      run_ebb(folder, {"train", "--data", write_text(folder), "--optimizer", "lbfgs", "--nproc", "2"}), 2,
      {"lbfgs", "whole parameters", "adamw"});
}

TEST(Usage, NamesAMissingFileAndOneThatIsEmptyOrTooShort) {
  const TemporaryFolder folder;
  expect_refused(run_ebb(folder, {"train"}), 2, {"--data"});
  expect_refused(run_ebb(folder, {"train", "--data", "nowhere.txt"}), 2, {"nowhere.txt", "No such file"});
  // Told once, though two ranks were asked for.
  expect_refused(
      run_ebb(folder, {"train", "--data", folder.write("empty.txt", ""), "--nproc", "2"}), 3,
      {"empty.txt", "is empty"});
  expect_refused(
      run_ebb(folder, {"train", "--data", folder.write("short.txt", "too short")}), 3, {"short.txt", "9 bytes", "65"});
}

TEST(Usage, ShowsWhereAnErrorAroseWhenAsked) {
  const TemporaryFolder folder;
  const auto outcome = run_ebb(folder, {"--verbose", "train", "--data", "nowhere.txt"});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("ebb: [MappedFile] cannot open"), HasSubstr("frame #0")));
}

TEST(Usage, LoadsATorchScriptFileOnlyWhenItsCodeIsTrusted) {
  const TemporaryFolder folder;
  const auto data = write_text(folder);
  const auto model = folder.write("model.pt", "no archive");
  expect_refused(
      run_ebb(folder, {"train", "--data", data, "--torchscript", model}), 2,
      {"model.pt", "holds code", "--trust-code"});
  expect_refused(
      run_ebb(folder, {"train", "--data", data, "--torchscript", model, "--trust-code", "--run-dir", "run"}), 3,
      {"model.pt", "no TorchScript archive"});
  expect_refused(
      run_ebb(folder, {"train", "--data", data, "--torchscript", "nowhere.pt", "--trust-code"}), 2, {"nowhere.pt"});
  expect_refused(
      run_ebb(folder, {"train", "--data", data, "--torchscript", model, "--trust-code", "--layers", "2"}), 2,
      {"--layers", "--torchscript"});
}

class ConfigFile : public ::testing::Test {
 protected:
  Outcome run_with(const std::string& config, const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments{"train", "--config", folder_.write("my.toml", config)};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_ebb(folder_, arguments);
  }
  TemporaryFolder folder_;
};

TEST_F(ConfigFile, NamesAnUnknownKeyWithFileLineAndTheNearestKey) {
  expect_refused(
      run_with("steps = 3\nweight_decy = 0.1\n"), 2, {"my.toml:2", "unknown key 'weight_decy'", "'weight_decay'"});
  expect_refused(run_with("[model]\nlayers = 3\n"), 2, {"my.toml:1", "unknown key 'model'"});
}

TEST_F(ConfigFile, NamesAValueOfTheWrongTypeOrOutOfBounds) {
  expect_refused(run_with("\n\nsteps = \"three\"\n"), 2, {"my.toml:3", "steps", "a whole number", "string"});
  expect_refused(run_with("steps = 2.5\n"), 2, {"my.toml:1", "steps", "a whole number"});
  expect_refused(run_with("data = \"one.txt\"\n"), 2, {"my.toml:1", "data", "a list"});
  expect_refused(run_with("data = [1]\n"), 2, {"my.toml:1", "data", "a string"});
  expect_refused(run_with("betas = [0.9]\n"), 2, {"my.toml:1", "betas", "2 numbers"});
  expect_refused(run_with("lr = 0\n"), 2, {"my.toml:1", "lr", "above 0"});
  expect_refused(run_with("\nlr = inf\n"), 2, {"my.toml:2", "lr", "a finite number"});
  expect_refused(run_with("\nclip = nan\n"), 2, {"my.toml:2", "clip", "a finite number"});
  expect_refused(run_with("\nprompt = \"\"\n"), 2, {"my.toml:2", "prompt", "at least one byte"});
  expect_refused(run_with("\nlayers = 1000000000000\n"), 2, {"my.toml:2", "layers", "in [1, 10000]"});
}

TEST_F(ConfigFile, NamesTheLineThatIsNoToml) {
  expect_refused(run_with("steps = 3\nlr == 4\n"), 2, {"my.toml:2", "not TOML"});
  expect_refused(run_with("steps = 3\nsteps = 4\n"), 2, {"my.toml:2"});
}

TEST_F(ConfigFile, CannotGrantTrust) {
  expect_refused(run_with("trust_code = true\n"), 2, {"my.toml:1", "--trust-code"});
}

TEST_F(ConfigFile, MustBeAReadableFileOfModestSize) {
  expect_refused(run_ebb(folder_, {"train", "--config", "nowhere.toml"}), 2, {"nowhere.toml"});
  expect_refused(run_ebb(folder_, {"train", "--config", folder_.path().string()}), 2, {"cannot read"});
  expect_refused(run_with("#" + std::string(2 << 20, 'x')), 2, {"larger than 1 MB"});
}

TEST_F(ConfigFile, OfTheDemoNamesTheSixNovels) {
  // Stops before training, as the flags leave no data; everything in the file has been read and checked by then.
  const auto outcome =
      run_ebb(folder_, {"train", "--config", EBB_EXAMPLES "/demo.toml", "--data", write_text(folder_)});
  expect_refused(outcome, 2, {"SENSE AND SENSIBILITY"});
}

} // namespace
} // namespace ebb::test
