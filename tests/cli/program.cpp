#include "program.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <fstream>
#include <iterator>
#include <thread>

namespace ebb::test {
namespace {

using namespace std::chrono_literals;

constexpr auto kLimit = 120s;
constexpr auto kPoll = 10ms;

} // namespace

Ebb::Ebb(const TemporaryFolder& folder, const std::vector<std::string>& arguments, const std::filesystem::path& out)
    : out_(out.empty() ? folder.path() / "stdout.txt" : out), err_(folder.path() / "stderr.txt") {
  std::vector<std::string> argv{EBB_PROGRAM};
  argv.insert(argv.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (auto& argument : argv) {
    pointers.push_back(argument.data());
  }
  pointers.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_addopen(&actions, 1, out_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  ::posix_spawn_file_actions_addopen(&actions, 2, err_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  if (::posix_spawn(&pid_, EBB_PROGRAM, &actions, nullptr, pointers.data(), environ) != 0) {
    ADD_FAILURE() << "cannot start " << EBB_PROGRAM;
    pid_ = -1;
  }
  ::posix_spawn_file_actions_destroy(&actions);
}

Ebb::~Ebb() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
}

void Ebb::signal(int signal) const {
  ASSERT_GT(pid_, 0);
  ::kill(pid_, signal);
}

void Ebb::kill_child() const {
  std::ifstream children("/proc/" + std::to_string(pid_) + "/task/" + std::to_string(pid_) + "/children");
  pid_t child = -1;
  ASSERT_TRUE(children >> child);
  ::kill(child, SIGKILL);
}

bool Ebb::wait_for_file(const std::filesystem::path& path) {
  const auto deadline = std::chrono::steady_clock::now() + 60s;
  std::error_code error;
  while (!std::filesystem::exists(path, error) || std::filesystem::file_size(path, error) == 0) {
    if (std::chrono::steady_clock::now() > deadline) {
      return false;
    }
    std::this_thread::sleep_for(kPoll);
  }
  return true;
}

Outcome Ebb::wait() {
  Outcome outcome;
  const auto deadline = std::chrono::steady_clock::now() + kLimit;
  int status = 0;
  while (pid_ > 0) {
    const auto ended = ::waitpid(pid_, &status, WNOHANG);
    if (ended == pid_) {
      outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      pid_ = -1;
    } else if (std::chrono::steady_clock::now() > deadline) {
      ADD_FAILURE() << "ebb did not end within " << kLimit.count() << " s";
      break; // the destructor kills it
    } else {
      std::this_thread::sleep_for(kPoll);
    }
  }
  outcome.out = std::filesystem::is_regular_file(out_) ? read_file(out_) : "";
  outcome.err = read_file(err_);
  return outcome;
}

Outcome run_ebb(const TemporaryFolder& folder, const std::vector<std::string>& arguments) {
  return Ebb(folder, arguments).wait();
}

std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

nlohmann::json read_json(const std::filesystem::path& path) {
  const auto text = read_file(path);
  auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  EXPECT_FALSE(json.is_discarded()) << path << " is no JSON: " << text;
  return json;
}

std::string write_text(const TemporaryFolder& folder, const std::string& name) {
  std::string text;
  for (int i = 0; i < 300; ++i) {
    text += "line " + std::to_string(i * i) + ": the quick brown fox jumps over the lazy dog\n";
  }
  return folder.write(name, text);
}

std::vector<std::string> tiny_training(
    const std::string& data, const std::string& run_dir, const std::vector<std::string>& more) {
  std::vector<std::string> arguments{"train", "--data",          data, "--run-dir", run_dir, "--layers",
                                     "2",     "--d-model",       "32", "--heads",   "2",     "--context",
                                     "16",    "--steps",         "3",  "--warmup",  "1",     "--eval-batches",
                                     "4",     "--sample-length", "20"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

} // namespace ebb::test
