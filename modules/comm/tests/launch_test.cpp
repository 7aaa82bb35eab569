#include "ebb/comm/launch.h"

#include "ebb/base/error.h"
#include "ebb/base/log.h"

#include "launch_output.h"
#include "launch_process.h"
#include "support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <future>
#include <sstream>
#include <thread>

namespace ebb::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

const LaunchOptions kQuick{.leave = 500ms, .grace = 500ms};

struct Outcome {
  int code = -1;
  std::vector<std::string> lines;
};

/// Ranks that are shell scripts: they need no store.
Outcome launch(int nproc, const std::string& script, const LaunchOptions& options = kQuick) {
  Outcome outcome;
  testing::internal::CaptureStdout();
  outcome.code = launch_local_ranks(nproc, {"sh", "-c", script}, options);
  std::istringstream text(testing::internal::GetCapturedStdout());
  for (std::string line; std::getline(text, line);) {
    outcome.lines.push_back(line);
  }
  return outcome;
}

TEST(LaunchLocalRanks, TellsEveryRankItsPlace) {
  const auto outcome =
      launch(3, "echo $EBB_RANK/$EBB_WORLD_SIZE local $EBB_LOCAL_RANK/$EBB_LOCAL_WORLD_SIZE at $EBB_MASTER_ADDR");
  EXPECT_EQ(outcome.code, 0);
  EXPECT_THAT(
      outcome.lines,
      UnorderedElementsAre("0/3 local 0/3 at 127.0.0.1", "1/3 local 1/3 at 127.0.0.1", "2/3 local 2/3 at 127.0.0.1"));
}

TEST(LaunchLocalRanks, GivesAllRanksOneTokenAndEveryJobItsOwn) {
  const auto first = launch(2, "echo $EBB_TOKEN:$EBB_MASTER_PORT");
  ASSERT_EQ(first.lines.size(), 2u);
  EXPECT_EQ(first.lines[0], first.lines[1]);
  EXPECT_EQ(first.lines[0].find(':'), 32u);
  const auto second = launch(2, "echo $EBB_TOKEN:$EBB_MASTER_PORT");
  EXPECT_NE(first.lines[0].substr(0, 32), second.lines[0].substr(0, 32));
}

TEST(LaunchLocalRanks, DividesTheCoresUnlessTheUserHas) {
  ::unsetenv("OMP_NUM_THREADS");
  const auto divided = launch(2, "echo $OMP_NUM_THREADS");
  EXPECT_THAT(divided.lines, Each(std::to_string(threads_per_rank(2))));
  EXPECT_THAT(launch(64, "echo $OMP_NUM_THREADS").lines, Each(std::to_string(threads_per_rank(64))));
  EXPECT_GE(threads_per_rank(1000), 1);
  ::setenv("OMP_NUM_THREADS", "7", 1);
  EXPECT_THAT(launch(2, "echo $OMP_NUM_THREADS").lines, Each(std::string("7")));
  ::unsetenv("OMP_NUM_THREADS");
}

TEST(LaunchLocalRanks, ReturnsTheCodeOfTheRankThatFailedFirst) {
  // Rank 1 fails first, rank 0 later, with another code.
  EXPECT_EQ(launch(3, "case $EBB_RANK in 1) exit 3;; 0) sleep 0.3; exit 9;; esac").code, 3);
}

TEST(LaunchLocalRanks, PrefersTheCauseToTheReportOfALostPeer) {
  EXPECT_EQ(launch(2, "case $EBB_RANK in 1) sleep 0.2; exit 7;; 0) exit 4;; esac").code, 7);
  EXPECT_EQ(launch(2, "exit 4").code, 4);
}

TEST(LaunchLocalRanks, ReturnsTheSignalThatKilledARank) {
  EXPECT_EQ(launch(2, "[ $EBB_RANK = 1 ] && kill -9 $$; sleep 20").code, 128 + SIGKILL);
}

TEST(LaunchLocalRanks, TellsTheOthersToEndAndThenKillsThem) {
  // Rank 1 ends at SIGTERM, rank 2 ignores it.
  const auto outcome = launch(
      3,
      "case $EBB_RANK in 0) exit 5;; 1) trap 'echo told; exit 0' TERM;; 2) trap 'echo ignored' TERM;; esac;"
      "echo ready; while :; do sleep 0.05; done");
  EXPECT_EQ(outcome.code, 5);
  EXPECT_EQ(std::count(outcome.lines.begin(), outcome.lines.end(), "told"), 1);
  EXPECT_EQ(std::count(outcome.lines.begin(), outcome.lines.end(), "ignored"), 1);
}

TEST(LaunchLocalRanks, LetsTheOthersEndByThemselves) {
  const auto outcome = launch(
      2, "[ $EBB_RANK = 0 ] && exit 5; trap 'echo told' TERM; sleep 0.3; echo saved; exit 0",
      {.leave = 20s, .grace = 20s});
  EXPECT_EQ(outcome.code, 5);
  EXPECT_THAT(outcome.lines, UnorderedElementsAre("saved"));
}

TEST(LaunchLocalRanks, KillsWhatARankLeavesRunning) {
  const auto outcome = launch(1, "sleep 300 & echo $!");
  EXPECT_EQ(outcome.code, 0);
  ASSERT_EQ(outcome.lines.size(), 1u);
  char state = 'R';
  const auto limit = std::chrono::steady_clock::now() + 20s; // a kill takes a moment
  while (state != 'Z' && state != '\0' && std::chrono::steady_clock::now() < limit) {
    std::ifstream file("/proc/" + outcome.lines[0] + "/stat");
    std::string pid, name, field;
    state = file >> pid >> name >> field ? field[0] : '\0';
  }
  EXPECT_TRUE(state == 'Z' || state == '\0') << state;
}

TEST(LaunchLocalRanks, PassesOutputOnByWholeLines) {
  const auto outcome = launch(
      4,
      "for i in 1 2 3 4 5 6 7 8 9 10; do printf 'rank %s' $EBB_RANK; sleep 0.01; printf ' says %s\\n' $i; done; printf "
      "end");
  EXPECT_EQ(outcome.code, 0);
  ASSERT_EQ(outcome.lines.size(), 44u);
  for (int rank = 0; rank < 4; ++rank) {
    for (int i = 1; i <= 10; ++i) {
      const auto line = "rank " + std::to_string(rank) + " says " + std::to_string(i);
      EXPECT_EQ(std::count(outcome.lines.begin(), outcome.lines.end(), line), 1) << line;
    }
  }
  EXPECT_EQ(std::count(outcome.lines.begin(), outcome.lines.end(), "end"), 4);
}

TEST(LaunchLocalRanks, StartsRanksWithSigpipeIgnored) {
  // Bit 13 of SigIgn: signal 13, counted from 1.
  const auto outcome = launch(2, "grep SigIgn /proc/self/status; grep SigBlk /proc/self/status");
  ASSERT_EQ(outcome.lines.size(), 4u);
  for (const auto& line : outcome.lines) {
    const auto mask = std::strtoull(line.substr(line.find(':') + 1).c_str(), nullptr, 16);
    if (line.starts_with("SigIgn")) {
      EXPECT_TRUE(mask & (1ULL << (SIGPIPE - 1))) << line;
    } else {
      EXPECT_EQ(mask, 0u) << line;
    }
  }
}

void do_nothing(int) {}

TEST(LaunchLocalRanks, PutsTheCallersSignalsBack) {
  ::signal(SIGUSR1, do_nothing);
  launch(1, "true");
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR2, SIGCHLD, SIGTSTP}) {
    EXPECT_EQ(::signal(signal, SIG_DFL), SIG_DFL) << signal;
  }
  EXPECT_EQ(::signal(SIGUSR1, SIG_DFL), &do_nothing);
}

TEST(LaunchLocalRanks, LeavesSignalsIgnoredThatTheCallerIgnores) {
  ::signal(SIGHUP, SIG_IGN); // as nohup does
  const auto outcome = launch(1, "kill -HUP $PPID; kill -HUP $$; sleep 0.3; echo alive");
  EXPECT_EQ(outcome.code, 0);
  EXPECT_THAT(outcome.lines, UnorderedElementsAre("alive"));
  EXPECT_EQ(::signal(SIGHUP, SIG_DFL), SIG_IGN);
}

TEST(LaunchLocalRanks, ForwardsSignalsAlsoWhereOtherThreadsRun) {
  std::promise<void> over;
  std::thread other([&] { over.get_future().wait(); }); // blocks no signals
  // The launcher's main thread does, so that the system has to choose the other one.
  sigset_t blocked;
  ::sigemptyset(&blocked);
  ::sigaddset(&blocked, SIGUSR1);
  ::pthread_sigmask(SIG_BLOCK, &blocked, nullptr);
  const auto outcome = launch(1, "trap 'echo forwarded; exit 0' USR1; kill -USR1 $PPID; while :; do sleep 0.05; done");
  ::pthread_sigmask(SIG_UNBLOCK, &blocked, nullptr);
  over.set_value();
  other.join();
  EXPECT_EQ(outcome.code, 0);
  EXPECT_THAT(outcome.lines, UnorderedElementsAre("forwarded"));
}

std::vector<std::string>& error_lines() {
  static std::vector<std::string> lines;
  return lines;
}

/// What the launcher itself says is wrong while `script` runs.
std::vector<std::string> errors_of(const std::string& script, int expected_code) {
  error_lines().clear();
  log::set_rank(-1); // other cases in this process may have been ranks
  log::set_sink([](log::Level level, int rank, std::string_view text) {
    if (level >= log::Level::kWarn) {
      error_lines().push_back((rank >= 0 ? "as a rank: " : "") + std::string(text));
    }
  });
  EXPECT_EQ(launch(2, script).code, expected_code);
  log::set_sink(nullptr);
  return error_lines();
}

TEST(LaunchLocalRanks, ReportsNoFailureOfRanksThatWereAskedToEnd) {
  // Rank 0 sends the signal once both ranks are ready for it.
  const ebb::test::TemporaryFolder folder;
  const std::string wait = "cd " + folder.path().string() +
                           "; : > $SIGNAL$EBB_TOKEN$EBB_RANK; if [ $EBB_RANK = 0 ]; then "
                           "until [ -e $SIGNAL${EBB_TOKEN}1 ]; do sleep 0.02; done; kill -s $SIGNAL $PPID; fi; "
                           "while :; do sleep 0.05; done";
  for (const auto& [signal, number] : {std::pair{"INT", SIGINT}, {"TERM", SIGTERM}, {"HUP", SIGHUP}}) {
    const auto name = std::string("SIGNAL=") + signal + "; ";
    EXPECT_THAT(errors_of(name + "trap 'exit 1' " + signal + "; " + wait, 1), ::testing::IsEmpty()) << signal;
    EXPECT_THAT(errors_of(name + wait, 128 + number), ::testing::IsEmpty()) << signal;
  }
  // A crash while it ends, and a failure without having been asked, are errors.
  EXPECT_THAT(
      errors_of("SIGNAL=TERM; trap 'kill -KILL $$' TERM; " + wait, 128 + SIGKILL),
      ::testing::ElementsAre(
          AllOf(HasSubstr("failed"), HasSubstr("signal 9"), ::testing::Not(HasSubstr("as a rank")))));
  EXPECT_THAT(errors_of("exit 1", 1), ::testing::ElementsAre(HasSubstr("failed")));
  EXPECT_THAT(
      errors_of("SIGNAL=USR1; trap 'exit 1' USR1; " + wait, 1), ::testing::ElementsAre(HasSubstr("exit code 1")));
}

TEST(LaunchLocalRanks, RefusesToRunTwiceAtOnce) {
  testing::internal::CaptureStdout();
  std::thread first([] { EXPECT_EQ(launch_local_ranks(1, {"sleep", "1"}, kQuick), 0); });
  std::this_thread::sleep_for(300ms);
  EXPECT_THROW(launch_local_ranks(1, {"true"}, kQuick), c10::ValueError);
  first.join();
  testing::internal::GetCapturedStdout();
}

TEST(LaunchLocalRanks, RunsArgumentsAsTheyAre) {
  testing::internal::CaptureStdout();
  EXPECT_EQ(launch_local_ranks(1, {"printf", "%s|", "a b", "$HOME", "*", ""}, kQuick), 0);
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "a b|$HOME|*||\n");
}

TEST(LaunchLocalRanks, ReturnsATellingCodeForAProgramThatIsNotThere) {
  EXPECT_EQ(launch_local_ranks(2, {"/no/such/program"}, kQuick), 127);
  EXPECT_EQ(launch_local_ranks(2, {"no-such-program-in-path"}, kQuick), 127);
}

TEST(LaunchLocalRanks, RefusesNonsense) {
  EXPECT_THROW(launch_local_ranks(0, {"true"}), c10::ValueError);
  EXPECT_THROW(launch_local_ranks(1025, {"true"}), c10::ValueError);
  EXPECT_THROW(launch_local_ranks(1, {}), c10::ValueError);
}

TEST(ChangedEnvironment, ReplacesByWholeNames) {
  ::setenv("EBB_TEST", "old", 1);
  ::setenv("EBB_TEST_LONGER", "kept", 1);
  const auto environment = changed_environment({"EBB_TEST=new"});
  EXPECT_EQ(std::count(environment.begin(), environment.end(), "EBB_TEST=new"), 1);
  EXPECT_EQ(std::count(environment.begin(), environment.end(), "EBB_TEST=old"), 0);
  EXPECT_EQ(std::count(environment.begin(), environment.end(), "EBB_TEST_LONGER=kept"), 1);
}

TEST(LinePipe, HoldsBackAnUnfinishedLine) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_NONBLOCK), 0);
  const auto arrived = [&] {
    char buffer[256];
    const auto count = ::read(ends[0], buffer, sizeof(buffer));
    return std::string(buffer, count > 0 ? static_cast<std::size_t>(count) : 0);
  };
  LinePipe pipe(ends[1], ">");
  ASSERT_EQ(::write(pipe.writer(), "one\ntw", 6), 6);
  pipe.pump();
  EXPECT_EQ(arrived(), ">one\n");
  ASSERT_EQ(::write(pipe.writer(), "o\n", 2), 2);
  pipe.pump();
  EXPECT_EQ(arrived(), ">two\n");
  ASSERT_EQ(::write(pipe.writer(), "end", 3), 3);
  pipe.close_writer();
  pipe.pump();
  EXPECT_EQ(pipe.reader(), -1);
  EXPECT_EQ(arrived(), "");
  pipe.finish();
  EXPECT_EQ(arrived(), ">end\n");
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST(LinePipe, KnowsWhetherLinesWereLost) {
  const int full = ::open("/dev/full", O_WRONLY);
  ASSERT_GE(full, 0);
  LinePipe pipe(full, "");
  EXPECT_EQ(pipe.error(), 0);
  ASSERT_EQ(::write(pipe.writer(), "one\n", 4), 4);
  pipe.pump();
  EXPECT_EQ(pipe.error(), ENOSPC);
  ::close(full);

  int ends[2];
  ASSERT_EQ(::pipe2(ends, 0), 0);
  ::signal(SIGPIPE, SIG_IGN);
  LinePipe unread(ends[1], "");
  ::close(ends[0]);
  ASSERT_EQ(::write(unread.writer(), "one\n", 4), 4);
  unread.pump();
  EXPECT_EQ(unread.error(), 0) << "a reader that leaves wants no more";
  ::close(ends[1]);
}

} // namespace
} // namespace ebb::comm
