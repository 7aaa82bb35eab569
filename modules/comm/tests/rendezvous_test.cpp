#include "rendezvous.h"

#include "ebb/base/error.h"

#include "liveness_report.h"
#include "rendezvous_net.h"
#include "rendezvous_token.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <cstdio>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

namespace ebb::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

StorePtr hash_store() {
  return c10::make_intrusive<c10d::HashStore>();
}

Clock::TimePoint in(std::chrono::milliseconds time) {
  return std::chrono::steady_clock::now() + time;
}

template <class E, class Body>
std::string message_from(Body body) {
  try {
    body();
  } catch (const E& error) {
    return message_of(error);
  }
  return "no error";
}

/// Local addresses of sockets that listen on `port`, as /proc writes them.
std::set<std::string> listening_on(int port) {
  std::set<std::string> found;
  char suffix[8];
  std::snprintf(suffix, sizeof(suffix), ":%04X", port);
  for (const char* path : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream file(path);
    std::string line;
    while (std::getline(file, line)) {
      std::istringstream fields(line);
      std::string number, local, remote, state;
      fields >> number >> local >> remote >> state;
      if (local.ends_with(suffix) && state == "0A") {
        found.insert(local.substr(0, local.find(':')));
      }
    }
  }
  return found;
}

TEST(HostStore, ListensOnLoopbackAlone) {
  const auto hosted = host_store({"127.0.0.1"}, 0);
  EXPECT_EQ(listening_on(hosted.port), std::set<std::string>{"0100007F"});
  const auto client = connect_store("127.0.0.1", hosted.port, in(30s));
  client->set("key", std::string("value"));
  EXPECT_EQ(hosted.store->get_to_str("key"), "value");
}

TEST(HostStore, NamesThePortThatIsTaken) {
  const auto hosted = host_store({"127.0.0.1"}, 0);
  const auto message = message_from<c10::ValueError>([&] { host_store({"127.0.0.1"}, hosted.port); });
  EXPECT_THAT(message, AllOf(HasSubstr(std::to_string(hosted.port)), HasSubstr("MASTER_PORT")));
}

TEST(HostStore, TakesTheFirstAddressThatIsThisHosts) {
  // 192.0.2.0/24 is reserved for documentation: nobody's address.
  const auto hosted = host_store({"192.0.2.7", "127.0.0.1"}, 0);
  EXPECT_EQ(listening_on(hosted.port), std::set<std::string>{"0100007F"});
  EXPECT_THAT(
      message_from<c10::ValueError>([] { host_store({"192.0.2.7"}, 0); }),
      AllOf(HasSubstr("192.0.2.7"), HasSubstr("MASTER_ADDR")));
}

TEST(ConnectStore, WaitsForTheServerToComeUp) {
  const auto probe = listen_on("127.0.0.1", 0);
  ASSERT_GE(probe.fd, 0);
  ::close(probe.fd);
  std::thread server([port = probe.port] {
    std::this_thread::sleep_for(200ms);
    const auto hosted = host_store({"127.0.0.1"}, port);
    hosted.store->wait({"bye"}, 30s);
  });
  const auto client = connect_store("127.0.0.1", probe.port, in(30s));
  client->set("bye", std::string("1"));
  server.join();
}

TEST(ConnectStore, SaysWhereNobodyAnswers) {
  const auto probe = listen_on("127.0.0.1", 0);
  ::close(probe.fd);
  EXPECT_THAT(
      message_from<TimeoutError>([&] { connect_store("127.0.0.1", probe.port, in(100ms)); }),
      HasSubstr("127.0.0.1:" + std::to_string(probe.port)));
}

TEST(Network, FindsThisHostsAddresses) {
  EXPECT_EQ(address_of_interface("lo"), "127.0.0.1");
  EXPECT_EQ(address_of_interface("none0"), "");
  EXPECT_EQ(own_address_towards("127.0.0.1"), "127.0.0.1");
  EXPECT_EQ(addresses_of("127.0.0.1"), std::vector<std::string>{"127.0.0.1"});
}

TEST(JobToken, IsRandom) {
  std::set<std::string> tokens;
  for (int i = 0; i < 100; ++i) {
    const auto token = random_token();
    EXPECT_EQ(token.size(), 32u);
    EXPECT_EQ(token.find_first_not_of("0123456789abcdef"), std::string::npos);
    tokens.insert(token);
  }
  EXPECT_EQ(tokens.size(), 100u);
}

TEST(JobToken, HashesAsHmacDoes) {
  // Worked out with Python's hashlib.
  EXPECT_EQ(keyed_hash("secret", "keys 00ff"), "1468fd77974a98e0539ddff32e397b1a04ecb925");
  EXPECT_EQ(keyed_hash(std::string(100, 'k'), "job"), "c2b470de9b0ab1353cb142d2b95c86ef473d770a");
  EXPECT_EQ(keyed_hash("", ""), "66a440a49a257fd061ebc4968f4fd416afcf4be2");
}

TEST(JobToken, AWrongOneIsRefusedAndLeavesNoTrace) {
  const auto store = hash_store();
  open_job(store, "right", "0");
  const auto job = enter_job(store, "right", "0", in(1s));
  job->set("rank/0", std::string("somebody"));
  const auto keys = store->getNumKeys();
  const auto message = message_from<c10::ValueError>([&] { enter_job(store, "wrong", "0", in(1s)); });
  EXPECT_THAT(message, AllOf(HasSubstr("refused"), HasSubstr("token"), HasSubstr("EBB_TOKEN")));
  EXPECT_THAT(message, AllOf(Not(HasSubstr("right")), Not(HasSubstr("'wrong'"))));
  EXPECT_EQ(store->getNumKeys(), keys);
}

TEST(JobToken, NeverLiesInTheStore) {
  const auto store = hash_store();
  open_job(store, "the-token", "0");
  enter_job(store, "the-token", "0", in(1s))->set("key", std::string("value"));
  for (const auto& key : store->listKeys()) {
    EXPECT_THAT(key + store->get_to_str(key), Not(HasSubstr("the-token")));
  }
}

TEST(JobToken, SeparatesTheKeysOfJobsAndAttempts) {
  const auto store = hash_store();
  open_job(store, "token", "0");
  open_job(store, "token", "1");
  const auto first = enter_job(store, "token", "0", in(1s));
  const auto second = enter_job(store, "token", "1", in(1s));
  first->set("key", std::string("first"));
  EXPECT_FALSE(second->check({"key"}));
}

TEST(EnterJob, SaysThatNobodyOpenedTheJob) {
  EXPECT_THAT(message_from<TimeoutError>([] { enter_job(hash_store(), "token", "0", in(50ms)); }), HasSubstr("rank 0"));
}

TEST(JoinJob, NamesTheRanksThatDoNotCome) {
  const auto job = hash_store();
  std::vector<std::string> messages(4);
  std::vector<std::thread> ranks;
  for (const int rank : {0, 2}) {
    ranks.emplace_back(
        [&, rank] { messages[rank] = message_from<TimeoutError>([&] { join_job(job, rank, 4, false, in(300ms)); }); });
  }
  for (auto& rank : ranks) {
    rank.join();
  }
  for (const int rank : {0, 2}) {
    EXPECT_THAT(messages[rank], HasSubstr("for 4 ranks; ranks 1, 3 did not join"));
  }
}

void join_all(const StorePtr& job, int size, std::vector<StorePtr>& groups) {
  groups.assign(static_cast<std::size_t>(size), nullptr);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] { groups[rank] = join_job(job, rank, size, rank == 0, in(60s)); });
  }
  for (auto& rank : ranks) {
    rank.join();
  }
}

TEST(JoinJob, GivesAllRanksOneStoreAndEachGroupItsOwn) {
  const auto job = hash_store();
  std::vector<StorePtr> first;
  std::vector<StorePtr> second;
  join_all(job, 3, first);
  join_all(job, 3, second);
  first[0]->set("key", std::string("first"));
  EXPECT_EQ(first[2]->get_to_str("key"), "first");
  EXPECT_FALSE(second[0]->check({"key"}));
  EXPECT_EQ(store_host(second[2]), 0);
}

TEST(JoinJob, RefusesASecondProcessOfTheSameRank) {
  const auto job = hash_store();
  job->set("rank/1", std::string("process 4711 on host other started at tick 5"));
  EXPECT_THAT(
      message_from<c10::ValueError>([&] { join_job(job, 1, 2, false, in(1s)); }),
      AllOf(HasSubstr("rank 1 has already joined"), HasSubstr("process 4711 on host other")));
}

TEST(JoinJob, HearsFromTheLauncherThatARankHasEnded) {
  const auto job = hash_store();
  std::thread launcher([&] {
    std::this_thread::sleep_for(50ms);
    report_end(job, 1, true, "it ended with exit code 3");
  });
  try {
    join_job(job, 0, 2, false, in(60s));
    ADD_FAILURE() << "joined a rank that has ended";
  } catch (const RankLostError& error) {
    EXPECT_EQ(error.rank(), 1);
    EXPECT_THAT(message_of(error), HasSubstr("exit code 3"));
  }
  launcher.join();
}

TEST(JoinJob, AFullGroupStandsAlthoughOneHasAlreadyEndedWell) {
  const auto job = hash_store();
  std::vector<StorePtr> groups;
  join_all(job, 2, groups);
  report_end(job, 1, false, "it ended with exit code 0");
  EXPECT_FALSE(loss_reported(groups[0]));
  report_end(job, 0, true, "it was killed by signal 9 (Killed)");
  EXPECT_TRUE(loss_reported(groups[0]));
}

TEST(LeaveStore, TheServingRankWaitsForTheOthers) {
  const auto job = hash_store();
  std::vector<StorePtr> groups;
  join_all(job, 3, groups);
  std::atomic<int> left{0};
  std::vector<std::thread> ranks;
  for (const int rank : {1, 2}) {
    ranks.emplace_back([&, rank] {
      std::this_thread::sleep_for(100ms * rank);
      ++left;
      leave_store(groups[rank]);
    });
  }
  wait_for_others_to_leave(groups[0], 3, 60s);
  EXPECT_EQ(left, 2);
  for (auto& rank : ranks) {
    rank.join();
  }
}

} // namespace
} // namespace ebb::comm
