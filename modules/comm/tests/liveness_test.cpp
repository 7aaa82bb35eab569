#include "liveness.h"

#include "ebb/base/error.h"
#include "ebb/base/log.h"

#include "liveness_report.h"
#include "liveness_watch.h"
#include "rendezvous.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace ebb::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

StorePtr beat_store() {
  return c10::make_intrusive<c10d::HashStore>();
}

// Loss within a quarter of a second.
GroupOptions quick() {
  return {.timeout = 60s, .heartbeat = 10ms, .dead_after = 250ms, .warn_after = 30s};
}

// No loss in any test, however loaded the machine is.
GroupOptions patient() {
  return {.timeout = 60s, .heartbeat = 10ms, .dead_after = 60s, .warn_after = 30s};
}

bool eventually(const std::function<bool()>& condition) {
  const auto limit = std::chrono::steady_clock::now() + 30s;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > limit) {
      return false;
    }
    std::this_thread::sleep_for(2ms);
  }
  return true;
}

/// A peer that gave one sign of life and then froze.
void freeze(const StorePtr& store, int rank, const std::string& op = "all_gather") {
  Beat beat;
  beat.count = 1;
  beat.sequence = 1;
  beat.step = 12;
  beat.op = op;
  beat.unit = "layers.3";
  store->set("liveness/beat/" + std::to_string(rank), beat.text());
}

template <class E>
std::string message_from(const std::function<void()>& body, int* rank = nullptr) {
  try {
    body();
  } catch (const E& error) {
    if constexpr (std::is_same_v<E, RankLostError>) {
      if (rank) {
        *rank = error.rank();
      }
    }
    return message_of(error);
  }
  return "no error";
}

TEST(Beat, SurvivesItsText) {
  Beat beat;
  beat.count = 7;
  beat.state = Beat::State::kFailed;
  beat.sequence = 3;
  beat.step = 12;
  beat.op = "all_gather";
  beat.unit = "layers.3 with\nlines";
  beat.why = "because";
  const auto read = Beat::parse(beat.text());
  EXPECT_EQ(read.count, 7u);
  EXPECT_EQ(read.state, Beat::State::kFailed);
  EXPECT_EQ(read.sequence, 3u);
  EXPECT_EQ(read.activity(), "all_gather of unit 'layers.3 with lines' at step 12");
  EXPECT_EQ(read.why, "because");
}

TEST(Beat, ReadsAnythingWithoutThrowing) {
  for (const char* text : {"", "\n\n\n\n\n\n\n\n", "x", "1\n9\n-1\n99999999999999999999\na", "-"}) {
    const auto beat = Beat::parse(text);
    EXPECT_EQ(beat.state, Beat::State::kAlive) << text;
    EXPECT_EQ(beat.step, -1) << text;
  }
}

TEST(LossReport, SurvivesItsTextAndReadsAnything) {
  const auto report = LossReport::parse(LossReport{3, "it was killed"}.text());
  EXPECT_EQ(report.rank, 3);
  EXPECT_EQ(report.why, "it was killed");
  EXPECT_EQ(LossReport::parse("").rank, -1);
  EXPECT_EQ(LossReport::parse("nobody").rank, -1);
  EXPECT_EQ(LossReport::parse("5").rank, 5);
}

Beat beat_number(std::uint64_t count, Beat::State state = Beat::State::kAlive) {
  Beat beat;
  beat.count = count;
  beat.state = state;
  return beat;
}

TEST(PeerWatch, CallsAPeerSilentWhenItsCounterStandsStill) {
  PeerWatch watch(0, 3, 2s, 20s);
  for (int round = 0; round <= 11; ++round) {
    EXPECT_FALSE(watch.silent()) << round;
    watch.saw(1, beat_number(static_cast<std::uint64_t>(round)));
    watch.saw(2, beat_number(5));
    watch.end_round(2s);
  }
  ASSERT_TRUE(watch.silent()); // 11 rounds of 2 s after the first sight
  EXPECT_EQ(watch.silent()->rank, 2);
  EXPECT_DOUBLE_EQ(watch.silent()->seconds, 22);
}

TEST(PeerWatch, DoesNotCountTheTimeInWhichItSleptItself) {
  PeerWatch watch(0, 2, 2s, 20s);
  watch.saw(1, beat_number(1));
  watch.end_round(2s);
  watch.saw(1, beat_number(1));
  watch.end_round(3600s); // stopped by the debugger, or the store was frozen
  EXPECT_FALSE(watch.silent());
  EXPECT_EQ(watch.peer(1).silence, 4s);
}

TEST(PeerWatch, StartsAnewWhenAPeerMovesAgain) {
  PeerWatch watch(0, 2, 2s, 20s);
  for (int round = 0; round < 9; ++round) {
    watch.saw(1, beat_number(1));
    watch.end_round(2s);
  }
  watch.saw(1, beat_number(2));
  watch.end_round(2s);
  EXPECT_EQ(watch.peer(1).silence, 0s);
}

TEST(PeerWatch, DoesNotMissPeersThatHaveLeft) {
  PeerWatch watch(0, 2, 2s, 20s);
  watch.saw(1, beat_number(1, Beat::State::kLeft));
  for (int round = 0; round < 100; ++round) {
    watch.end_round(2s);
  }
  EXPECT_FALSE(watch.silent());
  EXPECT_TRUE(watch.watched().empty());
  EXPECT_EQ(watch.first_plainly_left(), 1);
}

TEST(PeerWatch, WatchesTheNextFewPeersThatAreStillThere) {
  PeerWatch watch(98, 100, 2s, 20s);
  EXPECT_THAT(watch.watched(), ElementsAre(99, 0, 1, 2, 3, 4, 5, 6));
  watch.saw(0, beat_number(1, Beat::State::kLeft));
  watch.saw(2, beat_number(1, Beat::State::kFailed));
  EXPECT_THAT(watch.watched(), ElementsAre(99, 1, 3, 4, 5, 6, 7, 8));
}

TEST(PeerWatch, KnowsWhoIsBehind) {
  PeerWatch watch(0, 4, 2s, 20s);
  auto beat = beat_number(1);
  beat.sequence = 5;
  watch.saw(1, beat);
  beat.sequence = 4;
  watch.saw(2, beat);
  EXPECT_THAT(watch.behind(5), ElementsAre(2, 3));
}

TEST(Liveness, TellsWhatAPeerIsDoing) {
  const auto store = beat_store();
  Liveness first(store, 0, 2, patient(), nullptr);
  Liveness second(store, 1, 2, patient(), nullptr);
  second.set_step(12);
  EXPECT_EQ(second.begin("all_gather", "layers.3"), 1u);
  EXPECT_EQ(second.begin("all_gather", "layers.4", 13), 2u);
  ASSERT_TRUE(eventually([&] { return first.describe(1).find("layers.4") != std::string::npos; }));
  EXPECT_THAT(
      first.describe(1),
      AllOf(HasSubstr("rank 1 (alive, last seen "), HasSubstr(" in all_gather of unit 'layers.4' at step 13)")));
  EXPECT_EQ(first.lost_rank(), -1);
}

TEST(Liveness, NamesAPeerWhoseCounterStandsStill) {
  const auto store = beat_store();
  freeze(store, 1);
  std::mutex mutex;
  std::vector<std::pair<int, std::string>> calls;
  Liveness liveness(store, 0, 2, quick(), [&](int rank, const std::string& why) {
    const std::lock_guard lock(mutex);
    calls.emplace_back(rank, why);
  });
  ASSERT_TRUE(eventually([&] { return liveness.lost_rank() == 1; }));
  std::this_thread::sleep_for(100ms); // a second call would come with the next beats
  const std::lock_guard lock(mutex);
  ASSERT_EQ(calls.size(), 1u);
  EXPECT_EQ(calls[0].first, 1);
  EXPECT_THAT(
      calls[0].second,
      AllOf(HasSubstr("no sign of life for 0."), HasSubstr("last in all_gather of unit 'layers.3' at step 12")));
  EXPECT_EQ(liveness.lost_reason(), calls[0].second);
}

TEST(Liveness, TellsTheLossToRanksThatDoNotWatchTheLostOne) {
  const auto store = beat_store();
  constexpr int kSize = 30;
  for (int rank = 1; rank < kSize; ++rank) {
    if (rank != 20) {
      freeze(store, rank);
    }
  }
  std::vector<std::unique_ptr<Liveness>> ranks;
  auto options = patient();
  ranks.push_back(std::make_unique<Liveness>(store, 0, kSize, options, nullptr)); // watches 1 to 8
  options.dead_after = 250ms;
  ranks.push_back(std::make_unique<Liveness>(store, 20, kSize, options, nullptr)); // watches 21 to 28
  ASSERT_TRUE(eventually([&] { return ranks[0]->lost_rank() >= 0; }));
  EXPECT_GE(ranks[0]->lost_rank(), 21);
  EXPECT_EQ(ranks[0]->lost_rank(), ranks[1]->lost_rank());
}

TEST(Liveness, WaitThrowsWhenAPeerIsLost) {
  const auto store = beat_store();
  freeze(store, 1);
  Liveness liveness(store, 0, 2, quick(), nullptr);
  liveness.set_step(12);
  int rank = -2;
  const auto message =
      message_from<RankLostError>([&] { liveness.wait([] { return false; }, "reduce_scatter", "layers.2"); }, &rank);
  EXPECT_EQ(rank, 1);
  EXPECT_THAT(
      message,
      AllOf(
          HasSubstr("rank 1 was lost"), HasSubstr("Rank 0 was in reduce_scatter of unit 'layers.2' at step 12"),
          HasSubstr("restart the job")));
}

TEST(Liveness, TakesAFailureAsALossAtOnce) {
  const auto store = beat_store();
  Liveness first(store, 0, 2, patient(), nullptr);
  Liveness second(store, 1, 2, patient(), nullptr);
  ASSERT_TRUE(eventually([&] { return first.describe(1).find("alive") != std::string::npos; }));
  second.fail("the loss is not finite");
  ASSERT_TRUE(eventually([&] { return first.lost_rank() == 1; }));
  EXPECT_THAT(first.lost_reason(), HasSubstr("the loss is not finite"));
}

TEST(Liveness, TakesAnEndByAnExceptionAsALoss) {
  const auto store = beat_store();
  Liveness first(store, 0, 2, patient(), nullptr);
  try {
    Liveness second(store, 1, 2, patient(), nullptr);
    throw std::runtime_error("out of luck");
  } catch (const std::runtime_error&) {}
  ASSERT_TRUE(eventually([&] { return first.lost_rank() == 1; }));
  EXPECT_THAT(first.lost_reason(), HasSubstr("exception"));
}

TEST(Liveness, TellsTheOthersWhatItRanIntoBeforeItLeft) {
  const auto store = beat_store();
  Liveness first(store, 0, 2, patient(), nullptr);
  {
    auto options = patient();
    options.timeout = 50ms;
    Liveness second(store, 1, 2, options, nullptr);
    second.begin("all_gather", "layers.3");
    EXPECT_THROW(second.wait([] { return false; }, "all_gather", "layers.3"), TimeoutError);
  }
  ASSERT_TRUE(eventually([&] { return first.lost_rank() == 1; }));
  EXPECT_THAT(
      first.lost_reason(), AllOf(HasSubstr("it waited for"), HasSubstr("layers.3"), HasSubstr("rank 0 (alive")));
}

TEST(Liveness, DoesNotTakeAGoodbyeForALoss) {
  const auto store = beat_store();
  Liveness first(store, 0, 2, quick(), nullptr);
  {
    Liveness second(store, 1, 2, quick(), nullptr);
    ASSERT_TRUE(eventually([&] { return first.describe(1).find("alive") != std::string::npos; }));
  }
  std::this_thread::sleep_for(600ms); // more than twice dead_after
  EXPECT_EQ(first.lost_rank(), -1);
  EXPECT_THAT(first.describe(1), HasSubstr("rank 1 (left the group"));
}

TEST(Liveness, TakesTheFirstReportOnly) {
  const auto store = beat_store();
  Liveness liveness(store, 0, 4, patient(), nullptr);
  EXPECT_EQ(report_loss(store, {2, "killed"}).rank, 2);
  EXPECT_EQ(report_loss(store, {3, "killed later"}).rank, 2);
  ASSERT_TRUE(eventually([&] { return liveness.lost_rank() == 2; }));
  EXPECT_EQ(liveness.lost_reason(), "killed");
}

TEST(Liveness, HearsOfALossThatWasReportedBeforeItBegan) {
  const auto store = beat_store();
  report_loss(store, {1, "killed"});
  Liveness liveness(store, 0, 2, patient(), nullptr);
  EXPECT_TRUE(eventually([&] { return liveness.lost_rank() == 1; }));
}

TEST(Liveness, LearnsThatItsPeersGaveItUp) {
  const auto store = beat_store();
  Liveness liveness(store, 0, 2, patient(), nullptr);
  report_loss(store, {0, "no sign of life for 20.1 s"});
  int rank = -2;
  const auto message = message_from<RankLostError>([&] { liveness.wait([] { return false; }, "barrier", ""); }, &rank);
  EXPECT_EQ(rank, 0);
  EXPECT_THAT(message, HasSubstr("this rank (0) was given up by its peers: no sign of life for 20.1 s"));
}

std::mutex log_mutex;
std::vector<std::string> log_lines;
void keep_line(log::Level level, int, std::string_view text) {
  const std::lock_guard lock(log_mutex);
  if (level == log::Level::kWarn) {
    log_lines.emplace_back(text);
  }
}

TEST(Liveness, WarnsOfALivePeerThatIsLateAndTimesOutWithItsName) {
  const auto store = beat_store();
  auto options = patient();
  options.warn_after = 100ms;
  options.timeout = 1s;
  Liveness first(store, 0, 3, options, nullptr);
  Liveness second(store, 1, 3, options, nullptr);
  Liveness third(store, 2, 3, options, nullptr);
  for (auto* rank : {&first, &second, &third}) {
    rank->begin("all_gather", "layers.3", 12);
  }
  first.begin("all_gather", "layers.4", 12);
  third.begin("all_gather", "layers.4", 12);
  ASSERT_TRUE(eventually([&] { return first.describe(2).find("layers.4") != std::string::npos; }));
  log_lines.clear();
  log::set_sink(keep_line);
  const auto message = message_from<TimeoutError>([&] { first.wait([] { return false; }, "all_gather", "layers.4"); });
  log::set_sink(nullptr);
  // Rank 1 is late, rank 2 is not.
  const auto late = AllOf(
      HasSubstr("all_gather of unit 'layers.4' at step 12"), HasSubstr("rank 1 (alive"), HasSubstr("unit 'layers.3'"),
      Not(HasSubstr("rank 2")));
  EXPECT_THAT(message, late);
  const std::lock_guard lock(log_mutex);
  ASSERT_GE(log_lines.size(), 1u);
  EXPECT_THAT(log_lines[0], AllOf(HasSubstr("waiting for 0."), late));
  EXPECT_LE(log_lines.size(), 4u); // at 0.1, 0.3, 0.7 s and perhaps none more
}

TEST(Liveness, DoesNotCallThoseLateThatHaveBegunTheOperationWaitedFor) {
  const auto store = beat_store();
  auto options = patient();
  options.timeout = 300ms;
  Liveness first(store, 0, 2, options, nullptr);
  Liveness second(store, 1, 2, options, nullptr);
  const auto waited_for = first.begin("all_gather", "layers.3");
  first.begin("all_gather", "layers.4");
  second.begin("all_gather", "layers.3");
  ASSERT_TRUE(eventually([&] { return first.describe(1).find("layers.3") != std::string::npos; }));
  EXPECT_THAT(
      message_from<TimeoutError>([&] { first.wait([] { return false; }, "all_gather", "layers.3", waited_for); }),
      HasSubstr("all ranks have come to it"));
}

TEST(Liveness, WaitEndsWhenTheWorkIsDone) {
  const auto store = beat_store();
  Liveness liveness(store, 0, 2, patient(), nullptr);
  int polls = 0;
  liveness.wait([&] { return ++polls == 5; }, "barrier", "");
  EXPECT_EQ(polls, 5);
}

TEST(Liveness, ABrokenConnectionIsBlamedOnTheRankThatTheLauncherReports) {
  const auto store = beat_store();
  auto options = patient();
  options.heartbeat = 2s; // the report must be seen long before the next heartbeat is due
  Liveness liveness(store, 0, 3, options, nullptr);
  ASSERT_TRUE(eventually([&] { return store->check({"liveness/beat/0"}); }));
  std::thread launcher([&] {
    std::this_thread::sleep_for(50ms);
    report_loss(store, {2, "it was killed by signal 9 (Killed)"});
  });
  int rank = -2;
  const auto began = std::chrono::steady_clock::now();
  const auto message = message_from<RankLostError>(
      [&] {
        liveness.wait([]() -> bool { throw std::runtime_error("Connection closed by peer"); }, "all_gather", "a");
      },
      &rank);
  launcher.join();
  EXPECT_EQ(rank, 2);
  EXPECT_THAT(message, HasSubstr("killed by signal 9"));
  EXPECT_LT(std::chrono::steady_clock::now() - began, 30s);
}

TEST(Liveness, ABrokenConnectionIsBlamedOnTheRankThatLeftAndNotOnThoseThatFollowed) {
  const auto store = beat_store();
  Liveness liveness(store, 0, 3, patient(), nullptr);
  store->set("liveness/beat/1", [] {
    auto beat = beat_number(3, Beat::State::kLeft);
    beat.why = "after the loss of rank 2";
    return beat.text();
  }());
  store->set("liveness/beat/2", beat_number(3, Beat::State::kLeft).text());
  int rank = -2;
  const auto message =
      message_from<RankLostError>([&] { liveness.broken("all_gather", "a", "Connection closed by peer"); }, &rank);
  EXPECT_EQ(rank, 2);
  EXPECT_THAT(message, AllOf(HasSubstr("rank 2 was lost: it left the group"), HasSubstr("Connection closed by peer")));
  EXPECT_EQ(LossReport::parse(store->get_to_str("liveness/lost")).rank, 2); // the others hear of it too
}

TEST(Liveness, ABrokenConnectionBetweenLiveRanksIsBlamedOnNobody) {
  const auto store = beat_store();
  auto options = quick();
  options.dead_after = 2s;
  Liveness first(store, 0, 2, options, nullptr);
  Liveness second(store, 1, 2, options, nullptr);
  int rank = -2;
  const auto message = message_from<RankLostError>([&] { first.broken("all_gather", "a", "reset"); }, &rank);
  EXPECT_EQ(rank, -1);
  EXPECT_THAT(message, AllOf(HasSubstr("network"), HasSubstr("reset")));
}

TEST(Liveness, RefusesImpossibleOptions) {
  auto options = patient();
  options.dead_after = 15ms;
  EXPECT_THAT(
      message_from<c10::ValueError>([&] { Liveness(beat_store(), 0, 2, options, nullptr); }),
      AllOf(HasSubstr("dead_after"), HasSubstr("15 ms")));
  EXPECT_THAT(
      message_from<c10::ValueError>([&] { Liveness(beat_store(), 2, 2, patient(), nullptr); }),
      HasSubstr("rank 2 of 2"));
}

/// Counts keys read, and freezes on demand as a store does whose server is stopped.
class WatchedStore : public c10d::HashStore {
 public:
  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::intrusive_ptr<c10d::Store>::reclaim_copy(this);
  }
  void set(const std::string& key, const std::vector<std::uint8_t>& data) override {
    pass();
    ++sets;
    HashStore::set(key, data);
  }
  std::vector<std::vector<std::uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    pass();
    ++reads;
    most_keys = std::max<int>(most_keys, static_cast<int>(keys.size()));
    return HashStore::multiGet(keys);
  }
  void freeze(bool on) {
    const std::lock_guard lock(mutex_);
    frozen_ = on;
    thawed_.notify_all();
  }
  std::atomic<int> sets{0};
  std::atomic<int> reads{0};
  std::atomic<int> most_keys{0};

 private:
  void pass() {
    std::unique_lock lock(mutex_);
    thawed_.wait(lock, [&] { return !frozen_; });
  }
  std::mutex mutex_;
  std::condition_variable thawed_;
  bool frozen_ = false;
};

TEST(Liveness, AsksTheStoreForFewKeysHoweverLargeTheGroup) {
  const auto store = c10::make_intrusive<WatchedStore>();
  constexpr int kSize = 300;
  for (int rank = 1; rank < kSize; ++rank) {
    freeze(store, rank);
  }
  Liveness liveness(store, 0, kSize, patient(), nullptr);
  store->sets = 0;
  store->reads = 0;
  ASSERT_TRUE(eventually([&] { return store->reads >= 10; }));
  EXPECT_EQ(store->most_keys, 1 + PeerWatch::kWatched);
  EXPECT_NEAR(store->sets, store->reads, 1);
  liveness.describe(200);
  EXPECT_EQ(store->most_keys, kSize); // the loss report and all peers, once
}

TEST(Liveness, AFrozenStoreHangsNeitherAWaitNorTheEndOfTheGroup) {
  const auto store = c10::make_intrusive<WatchedStore>();
  auto options = quick();
  options.timeout = 500ms;
  std::atomic<bool> over{false};
  std::thread rank([&] {
    Liveness liveness(store, 0, 2, options, nullptr);
    eventually([&] { return store->reads >= 2; });
    store->freeze(true);
    EXPECT_THROW(liveness.wait([] { return false; }, "barrier", ""), TimeoutError);
    EXPECT_EQ(liveness.lost_rank(), -1);
    over = true;
  });
  rank.join(); // hangs, and the test with it, if the destructor waits for the store
  EXPECT_TRUE(over);
  store->freeze(false);
}

TEST(Liveness, TakesAStoreThatHangsAsTheLossOfTheRankThatServesIt) {
  const auto store = c10::make_intrusive<WatchedStore>();
  set_store_host(store, 2);
  std::atomic<int> told{-1};
  {
    Liveness liveness(store, 0, 3, quick(), [&](int rank, const std::string&) { told = rank; });
    Liveness host(store, 2, 3, quick(), nullptr);
    ASSERT_TRUE(eventually([&] { return store->reads >= 4; }));
    EXPECT_EQ(liveness.lost_rank(), -1);
    store->freeze(true);
    ASSERT_TRUE(eventually([&] { return told == 2; }));
    EXPECT_THAT(liveness.lost_reason(), HasSubstr("has not answered for 0."));
    EXPECT_EQ(host.lost_rank(), -1); // it does not accuse itself
    store->freeze(false);
  }
}

TEST(Liveness, DoesNotBlamePeersForAStoreThatWasFrozen) {
  const auto store = c10::make_intrusive<WatchedStore>();
  auto options = quick();
  options.dead_after = 500ms;
  Liveness first(store, 0, 2, options, nullptr);
  Liveness second(store, 1, 2, options, nullptr);
  ASSERT_TRUE(eventually([&] { return first.describe(1).find("alive") != std::string::npos; }));
  store->freeze(true);
  std::this_thread::sleep_for(1500ms);
  store->freeze(false);
  const int reads = store->reads;
  ASSERT_TRUE(eventually([&] { return store->reads > reads + 20; }));
  EXPECT_EQ(first.lost_rank(), -1);
  EXPECT_EQ(second.lost_rank(), -1);
}

TEST(Liveness, TakesTheEndOfTheStoreAsTheLossOfTheRankThatServesIt) {
  auto hosted = host_store({"127.0.0.1"}, 0);
  const auto client = connect_store("127.0.0.1", hosted.port, std::chrono::steady_clock::now() + 30s);
  set_store_host(client, 0);
  Liveness liveness(client, 1, 2, patient(), nullptr);
  freeze(client, 0);
  ASSERT_TRUE(eventually([&] { return liveness.describe(0).find("alive") != std::string::npos; }));
  hosted.store.reset();
  ASSERT_TRUE(eventually([&] { return liveness.lost_rank() == 0; }));
  EXPECT_THAT(liveness.lost_reason(), HasSubstr("serves the store"));
}

TEST(Liveness, GoesOnWithoutAStoreThatNoRankServes) {
  auto hosted = host_store({"127.0.0.1"}, 0);
  const auto client = connect_store("127.0.0.1", hosted.port, std::chrono::steady_clock::now() + 30s);
  log_lines.clear();
  log::set_sink(keep_line);
  {
    Liveness liveness(client, 1, 2, patient(), nullptr);
    ASSERT_TRUE(eventually([&] { return client->check({"liveness/beat/1"}); }));
    hosted.store.reset();
    ASSERT_TRUE(eventually([&] {
      const std::lock_guard lock(log_mutex);
      return !log_lines.empty();
    }));
    EXPECT_EQ(liveness.lost_rank(), -1);
    int polls = 0;
    liveness.wait([&] { return ++polls == 3; }, "barrier", "");
  }
  log::set_sink(nullptr);
  EXPECT_THAT(log_lines[0], HasSubstr("the store is gone"));
}

} // namespace
} // namespace ebb::comm
