#include "job.h"

#include "support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <csignal>
#include <memory>

namespace ebb::test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using ::testing::StartsWith;

// The launcher leaves ranks the time to end by themselves, so that the tests see what they say.
std::vector<std::string> launch(int nproc, std::vector<std::string> mode, const char* leave_ms = "30000") {
  std::vector<std::string> argv{EBB_DIST_RANK, "launch", std::to_string(nproc), leave_ms, "2000"};
  argv.insert(argv.end(), mode.begin(), mode.end());
  return argv;
}

// A peer that is silent for 2 s is lost.
const std::vector<std::string> kQuick{"EBB_HEARTBEAT_MS=100", "EBB_DEAD_AFTER_MS=2000"};
// No peer is lost for its silence within a test.
const std::vector<std::string> kPatient{"EBB_HEARTBEAT_MS=100", "EBB_DEAD_AFTER_MS=600000"};

// How the ranks move tensors; what they see of a peer's end differs.
class DistBy : public ::testing::TestWithParam<const char*> {
 protected:
  static std::vector<std::string> with(std::vector<std::string> changes) {
    changes.push_back(std::string("EBB_DIST_TRANSPORT=") + GetParam());
    return changes;
  }
};
INSTANTIATE_TEST_SUITE_P(Transport, DistBy, ::testing::Values("sockets", "memory", "hosts"), [](const auto& info) {
  return std::string(info.param);
});

int free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ::bind(fd, reinterpret_cast<sockaddr*>(&address), size);
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  ::close(fd);
  return ntohs(address.sin_port);
}

TEST_P(DistBy, RanksReduceAndEndWell) {
  Job job(launch(3, {"steps", "20", "1"}), with(kPatient));
  EXPECT_EQ(job.wait(), 0) << job.output();
  EXPECT_THAT(job.lines_with("done, sum 6"), SizeIs(3)) << job.output();
  EXPECT_THAT(job.lines_with("[warning]"), SizeIs(0)) << job.output();
  EXPECT_THAT(job.lines_with("[W"), SizeIs(0)) << job.output(); // of c10d
}

TEST_P(DistBy, AKilledRankIsNamedByAllOthersAtOnce) {
  Job job(launch(4, {"steps", "1000000", "1"}), with(kPatient));
  for (const char* rank : {"0", "1", "2", "3"}) {
    ASSERT_NE(job.wait_for(std::string("rank ") + rank + " is stepping"), "") << job.output();
  }
  ::kill(job.pid_of_rank(2), SIGKILL);
  EXPECT_EQ(job.wait(), 128 + SIGKILL) << job.output();
  // With dead_after at ten minutes only the launcher's report can name it, or its memory that is gone.
  const char* why = std::string(GetParam()) == "sockets" ? "killed by signal 9" : "";
  EXPECT_THAT(
      job.lines_with("RankLostError"),
      AllOf(SizeIs(3), Each(AllOf(HasSubstr("RankLostError 2: [all_reduce] rank 2"), HasSubstr(why)))))
      << job.output();
  EXPECT_THAT(job.lines_with("rank 2 failed: it was killed by signal 9"), SizeIs(1)) << job.output();
}

TEST_P(DistBy, AKilledRankZeroIsNamedAsWell) {
  Job job(launch(2, {"steps", "1000000", "1"}), with(kPatient));
  ASSERT_NE(job.wait_for("rank 1 is stepping"), "") << job.output();
  ::kill(job.pid_of_rank(0), SIGKILL);
  EXPECT_EQ(job.wait(), 128 + SIGKILL) << job.output();
  EXPECT_THAT(job.lines_with("RankLostError"), AllOf(SizeIs(1), Each(HasSubstr("RankLostError 0: ")))) << job.output();
}

TEST_P(DistBy, AStoppedRankIsNamedByAllOthers) {
  Job job(launch(3, {"steps", "1000000", "1"}, "1000"), with(kQuick));
  for (const char* rank : {"0", "1", "2"}) {
    ASSERT_NE(job.wait_for(std::string("rank ") + rank + " is stepping"), "") << job.output();
  }
  const pid_t stopped = job.pid_of_rank(1);
  ::kill(stopped, SIGSTOP);
  // Ranks 0 and 2 end with code 4, and so does the launcher; rank 1 is then woken and learns that it was given up.
  EXPECT_EQ(job.wait(), 4) << job.output();
  for (const char* rank : {"rank 0 RankLostError", "rank 2 RankLostError"}) {
    EXPECT_THAT(
        job.lines_with(rank),
        AllOf(SizeIs(1), Each(AllOf(HasSubstr("RankLostError 1: "), HasSubstr("no sign of life")))))
        << job.output();
  }
  EXPECT_FALSE(outlives(stopped));
}

TEST_P(DistBy, AThrowingRankIsNamedAndItsCodeReturned) {
  Job job(launch(3, {"throw", "1", "20"}), with(kPatient));
  EXPECT_EQ(job.wait(), 1) << job.output();
  EXPECT_THAT(job.lines_with("rank 1 exception: the loss is not finite"), SizeIs(1)) << job.output();
  EXPECT_THAT(job.lines_with("RankLostError"), AllOf(SizeIs(2), Each(HasSubstr("RankLostError 1: ")))) << job.output();
}

TEST_P(DistBy, ARankThatEndsWellTooEarlyIsNamed) {
  Job job(launch(3, {"return", "2", "20"}), with(kPatient));
  EXPECT_EQ(job.wait(), 4) << job.output();
  EXPECT_THAT(job.lines_with("RankLostError"), AllOf(SizeIs(2), Each(HasSubstr("RankLostError 2: ")))) << job.output();
}

TEST_P(DistBy, ABusyRankZeroIsNoError) {
  Job job(launch(3, {"busy", "0", "3"}), with({"EBB_HEARTBEAT_MS=100", "EBB_DEAD_AFTER_MS=1000"}));
  EXPECT_EQ(job.wait(), 0) << job.output();
  EXPECT_THAT(job.lines_with("done, sum 9"), SizeIs(3)) << job.output();
}

TEST_P(DistBy, ALivePeerThatDoesNotArriveIsNamedAtTheTimeout) {
  Job job(launch(2, {"busy", "1", "20"}, "200"), with({"EBB_HEARTBEAT_MS=100", "EBB_TIMEOUT_MS=3000"}));
  EXPECT_EQ(job.wait(), 4) << job.output();
  EXPECT_THAT(
      job.lines_with("rank 0 TimeoutError"),
      AllOf(SizeIs(1), Each(AllOf(HasSubstr("rank 1 (alive"), HasSubstr("'after'")))))
      << job.output();
}

TEST(Dist, AKilledRankLeavesTheOthersLastCollectivesInAFolder) {
  const TemporaryFolder folder;
  auto changes = kPatient;
  changes.push_back("EBB_FLIGHT_RECORDER_DIR=" + folder.path().string());
  Job job(launch(3, {"steps", "1000000", "1"}), changes);
  for (const char* rank : {"0", "1", "2"}) {
    ASSERT_NE(job.wait_for(std::string("rank ") + rank + " is stepping"), "") << job.output();
  }
  ::kill(job.pid_of_rank(2), SIGKILL);
  EXPECT_EQ(job.wait(), 128 + SIGKILL) << job.output();
  for (const int rank : {0, 1}) {
    const auto path = folder.path() / ("rank" + std::to_string(rank) + ".txt");
    EXPECT_THAT(job.lines_with("collectives of rank " + std::to_string(rank) + " are in " + path.string()), SizeIs(1));
    std::ifstream file(path);
    std::vector<std::string> lines;
    for (std::string line; std::getline(file, line);) {
      lines.push_back(line);
    }
    ASSERT_GE(lines.size(), 4) << job.output();
    EXPECT_THAT(
        lines[0],
        StartsWith(
            "rank " + std::to_string(rank) + " of 3, process " + std::to_string(job.pid_of_rank(rank)) + " on "));
    EXPECT_THAT(*(lines.end() - 2), AllOf(HasSubstr("all_reduce"), HasSubstr("failed")));
    EXPECT_THAT(
        lines.back(), AllOf(StartsWith("not finished: all_reduce of unit 'test' at step "), HasSubstr("rank 2")));
  }
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "rank2.txt"));
}

TEST(Dist, ARankThatEndsBeforeItJoinsIsNamed) {
  Job job(launch(3, {"early", "1", "9"}), kPatient);
  EXPECT_EQ(job.wait(), 9) << job.output();
  EXPECT_THAT(
      job.lines_with("RankLostError"),
      AllOf(SizeIs(2), Each(AllOf(HasSubstr("RankLostError 1: "), HasSubstr("exit code 9")))))
      << job.output();
}

TEST(Dist, SignalsReachEveryRankOnce) {
  Job job(launch(2, {"signals"}), kPatient);
  for (const char* rank : {"rank 0 is listening", "rank 1 is listening"}) {
    ASSERT_NE(job.wait_for(rank), "") << job.output();
  }
  for (const int signal : {SIGUSR1, SIGUSR2, SIGHUP, SIGINT, SIGTERM}) {
    job.signal(signal);
    for (const char* rank : {"rank 0", "rank 1"}) {
      const auto line = std::string(rank) + " got signal " + std::to_string(signal);
      EXPECT_NE(job.wait_for(line), "") << line << "\n" << job.output();
    }
  }
  EXPECT_EQ(job.wait(), 7) << job.output();
  EXPECT_THAT(job.lines_with("got signal"), SizeIs(10)) << job.output();
}

TEST(Dist, KeysOfATerminalReachEveryRankOnce) {
  Job job(launch(2, {"signals"}), kPatient, true);
  for (const char* rank : {"rank 0 is listening", "rank 1 is listening"}) {
    ASSERT_NE(job.wait_for(rank), "") << job.output();
  }
  const std::vector<pid_t> all{job.pid(), job.pid_of_rank(0), job.pid_of_rank(1)};
  job.type("\x03"); // Ctrl-C
  for (const char* rank : {"rank 0 got signal 2", "rank 1 got signal 2"}) {
    EXPECT_NE(job.wait_for(rank), "") << job.output();
  }
  job.type("\x1a"); // Ctrl-Z
  EXPECT_TRUE(all_come_to('T', all));
  job.signal(SIGCONT);
  EXPECT_TRUE(all_come_to('S', all));
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 7) << job.output();
  EXPECT_THAT(job.lines_with("got signal 2"), SizeIs(2)) << job.output();
}

TEST(Dist, NoRankOutlivesAKilledLauncher) {
  Job job(launch(3, {"steps", "1000000", "1"}), kPatient);
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ASSERT_NE(job.wait_for("rank " + std::to_string(rank) + " is stepping"), "") << job.output();
    ranks.push_back(job.pid_of_rank(rank));
  }
  job.signal(SIGKILL);
  EXPECT_EQ(job.wait(), 128 + SIGKILL);
  for (const pid_t rank : ranks) {
    EXPECT_FALSE(outlives(rank));
  }
}

// Ranks started by hand, as torchrun without an agent's store starts them.
struct Hand {
  std::string port = std::to_string(free_port());
  std::vector<std::string> place(int rank, int size, const std::string& token) const {
    return {
        "RANK=" + std::to_string(rank),
        "WORLD_SIZE=" + std::to_string(size),
        "LOCAL_RANK=" + std::to_string(rank),
        "LOCAL_WORLD_SIZE=" + std::to_string(size),
        "MASTER_ADDR=127.0.0.1",
        "MASTER_PORT=" + port,
        "EBB_TOKEN=" + token,
        "EBB_HEARTBEAT_MS=100",
        "EBB_DEAD_AFTER_MS=2000",
        "EBB_TIMEOUT_MS=60000"};
  }
};

TEST(Dist, RanksOfTorchrunMeetAtTheStoreOfRankZero) {
  const Hand hand;
  Job second({EBB_DIST_RANK, "steps", "20", "1"}, hand.place(1, 2, "t"));
  ASSERT_NE(second.wait_for("rank 1 pid"), ""); // it comes before the store is there
  Job first({EBB_DIST_RANK, "steps", "20", "1"}, hand.place(0, 2, "t"));
  EXPECT_EQ(first.wait(), 0) << first.output();
  EXPECT_EQ(second.wait(), 0) << second.output();
  EXPECT_THAT(first.lines_with("done, sum 3"), SizeIs(1));
  EXPECT_THAT(second.lines_with("done, sum 3"), SizeIs(1));
}

TEST(Dist, WithoutALauncherAKilledRankIsNamedByItsSilence) {
  const Hand hand;
  Job first({EBB_DIST_RANK, "steps", "1000000", "1"}, hand.place(0, 3, "t"));
  Job second({EBB_DIST_RANK, "steps", "1000000", "1"}, hand.place(1, 3, "t"));
  Job third({EBB_DIST_RANK, "steps", "1000000", "1"}, hand.place(2, 3, "t"));
  for (auto* job : {&first, &second, &third}) {
    ASSERT_NE(job->wait_for("is stepping"), "") << job->output();
  }
  third.signal(SIGKILL);
  for (auto* job : {&first, &second}) {
    EXPECT_EQ(job->wait(), 4) << job->output();
    EXPECT_THAT(job->lines_with("RankLostError"), AllOf(SizeIs(1), Each(HasSubstr("RankLostError 2: "))))
        << job->output();
  }
}

TEST(Dist, WithoutALauncherAKilledRankZeroIsNamedByTheEndOfItsStore) {
  const Hand hand;
  Job first({EBB_DIST_RANK, "steps", "1000000", "1"}, hand.place(0, 2, "t"));
  Job second({EBB_DIST_RANK, "steps", "1000000", "1"}, hand.place(1, 2, "t"));
  ASSERT_NE(second.wait_for("is stepping"), "") << second.output();
  first.signal(SIGKILL);
  EXPECT_EQ(second.wait(), 4) << second.output();
  EXPECT_THAT(second.lines_with("RankLostError"), AllOf(SizeIs(1), Each(HasSubstr("RankLostError 0: "))))
      << second.output();
}

// With it stands the store that it serves.
TEST(Dist, WithoutALauncherAStoppedRankZeroIsNamed) {
  const Hand hand;
  std::vector<std::unique_ptr<Job>> jobs;
  for (int rank = 0; rank < 3; ++rank) {
    jobs.push_back(std::make_unique<Job>(
        std::vector<std::string>{EBB_DIST_RANK, "steps", "1000000", "1"}, hand.place(rank, 3, "t")));
  }
  for (const auto& job : jobs) {
    ASSERT_NE(job->wait_for("is stepping"), "") << job->output();
  }
  jobs[0]->signal(SIGSTOP);
  for (const int rank : {1, 2}) {
    EXPECT_EQ(jobs[rank]->wait(), 4) << jobs[rank]->output();
    EXPECT_THAT(jobs[rank]->lines_with("RankLostError"), AllOf(SizeIs(1), Each(HasSubstr("RankLostError 0: "))))
        << jobs[rank]->output();
  }
  jobs[0]->signal(SIGCONT);
  EXPECT_EQ(jobs[0]->wait(), 4) << jobs[0]->output();
}

TEST(Dist, AStrangerWithAnotherTokenIsRefusedAndDisturbsNobody) {
  const Hand hand;
  Job first({EBB_DIST_RANK, "steps", "300", "10"}, hand.place(0, 2, "right"));
  ASSERT_NE(first.wait_for("rank 0 pid"), "");
  Job stranger({EBB_DIST_RANK, "steps", "300", "10"}, hand.place(1, 2, "wrong"));
  EXPECT_EQ(stranger.wait(), 2) << stranger.output(); // a wrong use
  EXPECT_THAT(
      stranger.lines_with("ValueError"), AllOf(SizeIs(1), Each(AllOf(HasSubstr("refused"), HasSubstr("EBB_TOKEN")))))
      << stranger.output();
  // Its place is still free for the right one, and a second stranger does not disturb the group at work.
  Job second({EBB_DIST_RANK, "steps", "300", "10"}, hand.place(1, 2, "right"));
  ASSERT_NE(second.wait_for("is stepping"), "") << second.output();
  Job late({EBB_DIST_RANK, "steps", "300", "10"}, hand.place(0, 2, "wrong"));
  EXPECT_EQ(late.wait(), 2) << late.output(); // rank 0 finds its port taken
  Job later({EBB_DIST_RANK, "steps", "300", "10"}, hand.place(1, 2, "wrong"));
  EXPECT_EQ(later.wait(), 2) << later.output();
  Job twin({EBB_DIST_RANK, "steps", "300", "10"}, hand.place(1, 2, "right"));
  EXPECT_EQ(twin.wait(), 2) << twin.output();
  EXPECT_THAT(twin.lines_with("rank 1 has already joined"), SizeIs(1)) << twin.output();
  EXPECT_EQ(first.wait(), 0) << first.output();
  EXPECT_EQ(second.wait(), 0) << second.output();
}

TEST(Dist, RanksThatDoNotComeAreNamed) {
  const Hand hand;
  auto place = hand.place(0, 3, "t");
  place.back() = "EBB_TIMEOUT_MS=2000";
  Job first({EBB_DIST_RANK, "steps", "1", "1"}, place);
  EXPECT_EQ(first.wait(), 4) << first.output();
  EXPECT_THAT(first.lines_with("TimeoutError"), AllOf(SizeIs(1), Each(HasSubstr("ranks 1, 2 did not join"))))
      << first.output();
}

} // namespace
} // namespace ebb::test
