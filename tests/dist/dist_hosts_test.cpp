#include "job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <memory>

// Two hosts in one: two network namespaces, joined by a pair of virtual interfaces whose counters tell what crosses.
namespace ebb::test {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr int kRanks = 4;
constexpr int kCount = 1 << 20;
constexpr std::int64_t kBytes = 4 * kCount;

std::vector<std::string> shell(const std::string& command) {
  return {"/bin/sh", "-c", "PATH=$PATH:/usr/sbin:/sbin; " + command};
}

class DistHosts : public ::testing::Test {
 protected:
  void SetUp() override {
    Job make(shell(
        "set -e; ip netns add " + name(0) + "; ip netns add " + name(1) + "; ip link add " + link(0) + " netns " +
        name(0) + " type veth peer name " + link(1) + " netns " + name(1) + "; " + up(0) + "; " + up(1)));
    if (const int code = make.wait(); code != 0) {
      GTEST_SKIP() << "two network namespaces need `ip` (iproute2) and CAP_SYS_ADMIN with CAP_NET_ADMIN: "
                   << make.output();
    }
  }
  void TearDown() override {
    Job(shell("ip netns delete " + name(0) + "; ip netns delete " + name(1))).wait();
  }

  /// Ranks 0 and 1 on the first host, 2 and 3 on the second. Only their names tell ebb: processes of two network
  /// namespaces can still read each other's memory.
  std::vector<std::unique_ptr<Job>> start(
      const std::string& mode, const std::vector<std::string>& changes,
      const std::vector<std::string>& host_names = {"host 0", "host 1"}) {
    std::vector<std::unique_ptr<Job>> jobs;
    for (int rank = 0; rank < kRanks; ++rank) {
      const int host = rank / 2;
      std::vector<std::string> environment{
          "RANK=" + std::to_string(rank),
          "WORLD_SIZE=4",
          "LOCAL_RANK=" + std::to_string(rank % 2),
          "LOCAL_WORLD_SIZE=2",
          "MASTER_ADDR=10.203.77.1",
          "MASTER_PORT=29533",
          "EBB_TOKEN=t",
          "EBB_HEARTBEAT_MS=100",
          "EBB_TIMEOUT_MS=60000",
          "EBB_HOST_ID=" + host_names[host]};
      for (const auto& change : changes) {
        environment.push_back(change);
      }
      jobs.push_back(
          std::make_unique<Job>(shell("exec ip netns exec " + name(host) + " " EBB_DIST_RANK " " + mode), environment));
    }
    return jobs;
  }

  /// What the host has sent to the other one so far, with the headers of the protocols.
  std::int64_t sent_by(int host) const {
    Job job(shell("ip netns exec " + name(host) + " cat /sys/class/net/" + link(host) + "/statistics/tx_bytes"));
    EXPECT_EQ(job.wait(), 0) << job.output();
    return std::stoll(job.output());
  }

 private:
  static std::string name(int host) {
    return "ebb" + std::to_string(::getpid()) + (host == 0 ? "a" : "b");
  }
  static std::string link(int host) {
    return host == 0 ? "ebba" : "ebbb";
  }
  static std::string up(int host) {
    const auto at = "ip -n " + name(host);
    return at + " address add 10.203.77." + std::to_string(host + 1) + "/24 dev " + link(host) + "; " + at +
           " link set " + link(host) + " up; " + at + " link set lo up";
  }
};

void expect_right(std::vector<std::unique_ptr<Job>>& jobs, const std::string& algorithm) {
  for (const auto& job : jobs) {
    EXPECT_EQ(job->wait(), 0) << job->output();
    EXPECT_THAT(job->lines_with("has the right bits"), SizeIs(4)) << job->output();
    EXPECT_THAT(job->lines_with(" gathers by " + algorithm), SizeIs(1)) << job->output();
    EXPECT_THAT(job->lines_with(" sums by " + algorithm), SizeIs(1)) << job->output();
  }
}

// Set-up, heartbeats, headers of packets and acknowledgements come on top of the payload.
void expect_about(std::int64_t sent, std::int64_t payload, const char* whose) {
  EXPECT_GE(sent, payload) << whose;
  EXPECT_LE(sent, payload + payload / 20 + 1000000) << whose;
}

TEST_F(DistHosts, BytesCrossOncePerHostAndSumsKeepTheirBits) {
  auto jobs = start("collectives " + std::to_string(kCount), {});
  expect_right(jobs, "hierarchical");
  const std::int64_t first = sent_by(0);
  const std::int64_t second = sent_by(1);
  // All-gather, reduce-scatter, all-reduce, broadcast from rank 0.
  expect_about(first, (2 + 4 + 1 + 1) * kBytes, "first host");
  expect_about(second, (2 + 2 + 1 + 0) * kBytes, "second host");

  // Directly, for comparison: to ebb all ranks are on one host here, which may not read memory.
  auto direct = start("collectives " + std::to_string(kCount), {"EBB_DIST_TRANSPORT=sockets"}, {"one", "one"});
  expect_right(direct, "direct");
  expect_about(sent_by(0) - first, (4 + 4 + 2 + 1) * kBytes, "first host, directly");
  expect_about(sent_by(1) - second, (4 + 4 + 2 + 0) * kBytes, "second host, directly");
}

TEST_F(DistHosts, AKilledRankIsNamedOnBothHosts) {
  auto jobs = start("steps 1000000 1", {"EBB_DEAD_AFTER_MS=2000"});
  for (const auto& job : jobs) {
    ASSERT_NE(job->wait_for("is stepping"), "") << job->output();
  }
  ::kill(jobs[3]->pid_of_rank(3), SIGKILL);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(jobs[rank]->wait(), 4) << jobs[rank]->output();
    EXPECT_THAT(jobs[rank]->lines_with("RankLostError"), AllOf(SizeIs(1), Each(HasSubstr("RankLostError 3: "))))
        << jobs[rank]->output();
  }
}

} // namespace
} // namespace ebb::test
