#include "program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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
  expect_refused(run_ebb(folder, {"train", "--data", data, "--steps", "0"}), 2, {"--steps", "at least 1", "got 0"});
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
