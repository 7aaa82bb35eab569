#include "ebb/comm/flight_recorder.h"

#include "connect_group.h"
#include "recorded_communicator.h"
#include "support/spawn_ranks.h"
#include "support/temporary_folder.h"

#include "ebb/base/error.h"
#include "ebb/base/log.h"
#include "ebb/comm/mesh.h"
#include "support/complaint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <atomic>
#include <barrier>
#include <cstdlib>
#include <thread>

namespace ebb::comm {
namespace {

using ebb::test::complaint;

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::StartsWith;

using State = CollectiveRecord::State;

/// A variable of this process, for one test.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) {
    ::setenv(name, value.c_str(), 1);
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;
  ~Variable() {
    ::unsetenv(name_);
  }

 private:
  const char* name_;
};

std::vector<std::string> lines_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    lines.push_back(line);
  }
  return lines;
}

std::vector<std::string> lines_with(const std::vector<std::string>& lines, const std::string& text) {
  std::vector<std::string> found;
  for (const auto& line : lines) {
    if (line.find(text) != std::string::npos) {
      found.push_back(line);
    }
  }
  return found;
}

FlightSettings settings_for(const char* count, const char* folder = nullptr) {
  return flight_settings([&](const char* name) { return name == std::string("EBB_FLIGHT_RECORDER") ? count : folder; });
}

std::vector<std::string> units_of(const std::vector<CollectiveRecord>& records) {
  std::vector<std::string> units;
  for (const auto& record : records) {
    units.push_back(record.unit);
  }
  return units;
}

void gather(Communicator& group, const std::string& unit) {
  group.all_gather(at::empty({2 * group.size()}), at::zeros({2}), unit)->wait();
}

TEST(FlightRecorder, KeepsTheLastCollectivesInOrder) {
  const auto group = record(single_group(), {.capacity = 3});
  EXPECT_THAT(flight_record(*group), IsEmpty());
  gather(*group, "a");
  gather(*group, "b");
  EXPECT_THAT(units_of(flight_record(*group)), ElementsAre("a", "b"));
  for (const char* unit : {"c", "d", "e"}) {
    gather(*group, unit);
  }
  const auto records = flight_record(*group);
  EXPECT_THAT(units_of(records), ElementsAre("c", "d", "e"));
  EXPECT_EQ(records.front().number, 3);
  EXPECT_EQ(records.back().number, 5);
}

TEST(FlightRecorder, ARecordSaysWhatWasCalled) {
  const auto group = record(single_group(), {.capacity = 8});
  group->set_step(12);
  group->all_gather(at::empty({5}, at::kBFloat16), at::zeros({5}, at::kBFloat16), "layers.3")->wait();
  group->reduce_scatter(at::empty({6}), at::zeros({6}), 2, "head")->wait();
  group->all_reduce(at::zeros({7}, at::kDouble), ReduceOp::kSum, 1, "loss")->wait();
  group->broadcast(at::zeros({3}, at::kLong), 0, "seed")->wait();
  group->barrier();
  EXPECT_EQ(group->exchange("hello"), std::vector<std::string>{"hello"});
  struct Expected {
    Op op;
    std::string unit;
    std::int64_t bytes;
    at::ScalarType dtype;
  };
  const std::vector<Expected> expected = {
      {Op::kAllGather, "layers.3", 10, at::kBFloat16},
      {Op::kReduceScatter, "head", 24, at::kFloat},
      {Op::kAllReduce, "loss", 56, at::kDouble},
      {Op::kBroadcast, "seed", 24, at::kLong},
      {Op::kBarrier, "", 0, at::kByte},
      {Op::kExchange, "", 5, at::kByte}};
  const auto records = flight_record(*group);
  ASSERT_THAT(records, SizeIs(expected.size()));
  for (std::size_t i = 0; i < records.size(); ++i) {
    EXPECT_EQ(records[i].number, i + 1);
    EXPECT_EQ(records[i].op, expected[i].op);
    EXPECT_EQ(records[i].unit, expected[i].unit);
    EXPECT_EQ(records[i].bytes, expected[i].bytes);
    EXPECT_EQ(records[i].dtype, expected[i].dtype);
    EXPECT_EQ(records[i].step, 12);
    EXPECT_EQ(records[i].group, "world");
    EXPECT_EQ(records[i].group_size, 1);
    EXPECT_EQ(records[i].state, State::kDone);
  }
}

TEST(FlightRecorder, StateAndTimeFollowTheWork) {
  ScriptedClock clock;
  const auto group = record(single_group(), {.capacity = 8}, clock);
  clock.advance(std::chrono::seconds(100));
  const auto last = [&] { return flight_record(*group).back(); };

  auto work = group->all_gather(at::empty({2}), at::zeros({2}), "unit");
  clock.advance(std::chrono::seconds(2));
  EXPECT_EQ(last().state, State::kStarted);
  EXPECT_EQ(last().started.time_since_epoch(), std::chrono::seconds(100));
  EXPECT_EQ(last().seconds, 2);
  clock.advance(std::chrono::seconds(3));
  work->wait();
  clock.advance(std::chrono::seconds(4));
  work->release(); // Its end was noted before.
  work.reset();
  EXPECT_EQ(last().state, State::kDone);
  EXPECT_EQ(last().seconds, 5);

  work = group->all_gather(at::empty({2}), at::zeros({2}), "unit");
  EXPECT_TRUE(work->poll());
  EXPECT_EQ(last().state, State::kDone);

  work = group->all_gather(at::empty({2}), at::zeros({2}), "unit");
  clock.advance(std::chrono::seconds(6));
  work.reset();
  EXPECT_EQ(last().state, State::kDropped);
  EXPECT_EQ(last().seconds, 6);

  group->abort();
  EXPECT_THROW(group->barrier(), RankLostError);
  EXPECT_EQ(last().state, State::kFailed);
  EXPECT_EQ(last().op, Op::kBarrier);
  EXPECT_EQ(last().number, 4);
}

TEST(FlightRecorder, ARefusedCallIsNotCounted) {
  const auto group = record(single_group(), {.capacity = 4});
  gather(*group, "good");
  EXPECT_THROW(group->all_gather(at::empty({3}), at::zeros({2}), "bad"), c10::ValueError);
  EXPECT_THROW(group->all_gather(at::empty({2}), at::Tensor(), "bad"), c10::ValueError);
  EXPECT_THROW(group->exchange(std::string((1 << 20) + 1, 'x')), c10::ValueError);
  gather(*group, "also good");
  const auto records = flight_record(*group);
  EXPECT_THAT(units_of(records), ElementsAre("good", "also good"));
  EXPECT_EQ(records.back().number, 2);
}

TEST(FlightRecorder, IsOffByZero) {
  const auto plain = single_group();
  EXPECT_EQ(record(plain, settings_for("0")), plain);
  const Variable off("EBB_FLIGHT_RECORDER", "0");
  const auto group = single();
  group->barrier();
  EXPECT_THAT(flight_record(*group), IsEmpty());
}

TEST(FlightRecorder, EveryGroupHasOneUnlessToldOtherwise) {
  const auto group = single();
  for (int i = 0; i < 100; ++i) {
    group->barrier();
  }
  EXPECT_THAT(flight_record(*group), SizeIs(64));
  const auto made = init({});
  made->barrier();
  EXPECT_THAT(flight_record(*made), SizeIs(1));
}

TEST(FlightRecorder, BadValuesAreRefused) {
  EXPECT_EQ(settings_for(nullptr).capacity, 64);
  EXPECT_EQ(settings_for("").capacity, 64);
  EXPECT_EQ(settings_for("65536").capacity, 65536);
  for (const char* bad : {"x", "-1", "65537", "8 ", "1e3", "99999999999999999999"}) {
    EXPECT_EQ(
        complaint([&] { settings_for(bad); }),
        std::string("[init] EBB_FLIGHT_RECORDER must be a whole number of collectives from 0 (off) to 65536, got '") +
            bad + "'; correct or unset it");
  }
  const test::TemporaryFolder folder;
  const auto file = folder.write("file", "text");
  for (const auto& bad : {file, file + "/below"}) {
    EXPECT_THAT(
        complaint([&] { settings_for("8", bad.c_str()); }),
        AllOf(
            StartsWith("[init] EBB_FLIGHT_RECORDER_DIR=" + bad), HasSubstr("must be a folder that this rank may write"),
            HasSubstr("name one, or unset it")));
  }
  EXPECT_EQ(settings_for("0", file.c_str()).folder, ""); // Not looked at.
  const auto made = settings_for("8", (folder.path() / "a" / "b").c_str()).folder;
  EXPECT_TRUE(std::filesystem::is_directory(made));

  const Variable bad("EBB_FLIGHT_RECORDER", "many");
  EXPECT_THAT(complaint([] { init({}); }), HasSubstr("EBB_FLIGHT_RECORDER"));
  EXPECT_THAT(complaint([] { single(); }), HasSubstr("got 'many'"));
}

TEST(FlightRecorder, ARankThatHangsCanBeAskedFromAnotherThread) {
  std::shared_ptr<Communicator> waiting;
  std::barrier published(2);
  test::spawn_ranks(2, [&](const std::shared_ptr<Communicator>& group) {
    if (group->rank() == 0) {
      waiting = group;
      published.arrive_and_wait();
    } else {
      published.arrive_and_wait();
      std::vector<CollectiveRecord> records;
      while (records.empty()) {
        records = flight_record(*waiting);
      }
      EXPECT_EQ(records[0].op, Op::kBarrier);
      EXPECT_EQ(records[0].state, State::kStarted);
      EXPECT_EQ(records[0].group_size, 2);
    }
    group->barrier();
    published.arrive_and_wait();
    if (group->rank() == 0) {
      waiting.reset();
      EXPECT_EQ(flight_record(*group)[0].state, State::kDone);
    }
  });
}

std::vector<std::string> logged;

std::vector<std::string> log_of(const std::function<void()>& body) {
  logged.clear();
  log::set_sink([](log::Level level, int /*rank*/, std::string_view text) {
    if (level == log::Level::kError) {
      logged.emplace_back(text);
    }
  });
  body();
  log::set_sink(nullptr);
  return logged;
}

TEST(FlightRecorder, WithoutAFolderTheLogGetsTheLastEightOnce) {
  const auto lines = log_of([] {
    const auto group = record(single_group(), {.capacity = 64});
    group->set_step(5);
    std::unique_ptr<Work> open;
    for (int i = 1; i <= 19; ++i) {
      const auto unit = "unit " + std::to_string(i);
      if (i == 14) {
        open = group->all_gather(at::empty({2}), at::zeros({2}), unit);
      } else {
        gather(*group, unit);
      }
    }
    group->abort();
    EXPECT_THROW(gather(*group, "unit 20"), RankLostError);
    EXPECT_THROW(gather(*group, "unit 21"), RankLostError);
  });
  ASSERT_THAT(lines, SizeIs(11));
  EXPECT_THAT(lines[0], HasSubstr("the last 8 of 20 collectives of rank 0"));
  EXPECT_THAT(lines[0], HasSubstr("EBB_FLIGHT_RECORDER_DIR=FOLDER writes all to a file"));
  EXPECT_THAT(lines[1], AllOf(HasSubstr("collective"), HasSubstr("state")));
  EXPECT_THAT(lines[2], AllOf(HasSubstr("unit 13 "), HasSubstr("done")));
  EXPECT_THAT(lines[3], AllOf(HasSubstr("unit 14 "), HasSubstr("started"), HasSubstr("so far")));
  EXPECT_THAT(lines[9], AllOf(HasSubstr("unit 20 "), HasSubstr("failed"), HasSubstr("all_gather"), HasSubstr("Float")));
  EXPECT_THAT(lines[10], HasSubstr("not finished: all_gather of unit 'unit 20' at step 5, number 20 of group world: "));
}

TEST(FlightRecorder, AFileThatCannotBeWrittenIsSaidAndTheLogUsed) {
  const test::TemporaryFolder folder;
  std::filesystem::create_directory(folder.path() / "rank0.txt"); // In the way.
  const auto lines = log_of([&] {
    const auto group = record(single_group(), {.capacity = 4, .folder = folder.path().string()});
    group->barrier();
    std::filesystem::create_directory(folder.path() / "rank0.txt" / "below");
    group->abort();
  });
  ASSERT_THAT(lines, SizeIs(5));
  EXPECT_THAT(lines[0], AllOf(HasSubstr("rank0.txt could not be written"), HasSubstr("directory")));
  EXPECT_THAT(lines[3], AllOf(HasSubstr("barrier"), HasSubstr("done")));
  EXPECT_THAT(lines[4], HasSubstr("left by itself: it left the group by abort()"));
}

enum class Way { kReads, kSockets, kHosts };

std::function<GroupOptions(int)> options_of(Way way) {
  return [way](int rank) {
    return GroupOptions{
        .timeout = std::chrono::seconds(60),
        .heartbeat = std::chrono::milliseconds(100),
        .host = way == Way::kHosts ? (rank < 2 ? "a" : "b") : "",
        .same_host_reads = way != Way::kSockets};
  };
}

/// Runs four ranks whatever way they talk, their reports going to `folder`. Some of them must fail.
void on_failing_ranks(
    const std::function<void(const std::shared_ptr<Communicator>&)>& body,
    const std::function<void(const std::filesystem::path& folder)>& look) {
  for (const auto way : {Way::kReads, Way::kSockets, Way::kHosts}) {
    SCOPED_TRACE(way == Way::kReads ? "reads" : way == Way::kSockets ? "sockets" : "hosts");
    const test::TemporaryFolder folder;
    const Variable variable("EBB_FLIGHT_RECORDER_DIR", folder.path().string());
    EXPECT_ANY_THROW(test::spawn_ranks(4, body, options_of(way)));
    look(folder.path());
  }
}

std::string file_of(int rank) {
  return "rank" + std::to_string(rank) + ".txt";
}

TEST(FlightRecorder, ALostRankLeavesFilesThatNameWhatDidNotFinish) {
  constexpr int kRanks = 4;
  constexpr int kGuilty = 2;
  std::barrier step_ended(kRanks);
  const auto body = [&](const std::shared_ptr<Communicator>& group) {
    const auto tensor = at::zeros({20000});
    for (int step = 0; step < 3; ++step) {
      group->set_step(step);
      if (group->rank() == kGuilty && step == 2) {
        throw std::runtime_error("the loss is not finite");
      }
      group->all_reduce(tensor, ReduceOp::kSum, 1, "layers.3")->release();
      group->barrier();
      step_ended.arrive_and_wait();
    }
  };
  on_failing_ranks(body, [](const std::filesystem::path& folder) {
    for (int rank = 0; rank < kRanks; ++rank) {
      const auto lines = lines_of(folder / file_of(rank));
      const auto count = rank == kGuilty ? 4 : 5;
      ASSERT_THAT(lines, SizeIs(3 + count)) << "rank " << rank;
      EXPECT_THAT(
          lines[0], StartsWith("rank " + std::to_string(rank) + " of 4, process " + std::to_string(::getpid())));
      EXPECT_THAT(lines[0], HasSubstr("its last " + std::to_string(count) + " collectives, oldest first"));
      EXPECT_THAT(lines[1], StartsWith("group"));
      EXPECT_THAT(
          lines[2],
          AllOf(StartsWith("world  4      1 "), HasSubstr("all_reduce"), HasSubstr("80000"), HasSubstr("done")));
      EXPECT_THAT(lines_with(lines, " done "), SizeIs(4));
      if (rank == kGuilty) {
        EXPECT_EQ(lines.back(), "left by itself: it left the group by abort()");
      } else {
        EXPECT_THAT(lines[6], AllOf(HasSubstr("layers.3"), HasSubstr("failed")));
        EXPECT_THAT(
            lines.back(),
            AllOf(
                StartsWith("not finished: all_reduce of unit 'layers.3' at step 2, number 5 of group world: "),
                HasSubstr("rank 2")));
      }
    }
  });
}

TEST(FlightRecorder, RanksThatDisagreeShowWhatEachCalled) {
  std::barrier all_are_through(4);
  const auto body = [&](const std::shared_ptr<Communicator>& group) {
    group->barrier();
    all_are_through.arrive_and_wait();
    const bool odd = group->rank() == 1;
    group->all_gather(at::zeros({40}), at::zeros({10}), odd ? "odd" : "even")->wait();
  };
  on_failing_ranks(body, [](const std::filesystem::path& folder) {
    for (int rank = 0; rank < 4; ++rank) {
      const auto lines = lines_of(folder / file_of(rank));
      ASSERT_THAT(lines, SizeIs(5)) << "rank " << rank;
      const std::string unit = rank == 1 ? "odd" : "even";
      EXPECT_THAT(lines[3], AllOf(HasSubstr(" " + unit + " "), HasSubstr("failed")));
      EXPECT_THAT(
          lines.back(),
          StartsWith("not finished: all_gather of unit '" + unit + "' at step 0, number 2 of group world"));
    }
  });
}

TEST(FlightRecorder, GroupsOfAMeshAreInTheSameFile) {
  std::barrier begun(4);
  const auto body = [&](const std::shared_ptr<Communicator>& world) {
    const auto mesh = Mesh::replicate_by_shard(world, 2, 2);
    world->set_step(7);
    auto& shard = *mesh.axis("shard");
    auto& replicate = *mesh.axis("replicate");
    gather(shard, "first");
    gather(replicate, "second");
    gather(*world, "third");
    gather(*mesh.shard_neighbours(1), "fourth");
    const auto records = flight_record(shard);
    ASSERT_THAT(records, SizeIs(1));
    EXPECT_EQ(records[0].step, 7);
    EXPECT_EQ(records[0].group_size, 2);
    EXPECT_EQ(records[0].group, world->rank() < 2 ? "2x2/shard0" : "2x2/shard1");
    begun.arrive_and_wait();
    if (world->rank() == 3) {
      throw std::runtime_error("no more");
    }
    if (world->rank() == 2) {
      gather(shard, "last");
    }
    begun.arrive_and_wait();
  };
  // Rank 3 and, because of it, rank 2 do not come to the end.
  const auto arriving = [&](const std::shared_ptr<Communicator>& world) {
    try {
      body(world);
    } catch (...) {
      world->abort();
      begun.arrive_and_wait();
      throw;
    }
  };
  on_failing_ranks(arriving, [](const std::filesystem::path& folder) {
    const auto lines = lines_of(folder / file_of(2));
    ASSERT_THAT(lines, SizeIs(8));
    EXPECT_THAT(lines[2], AllOf(StartsWith("2x2/shard1 "), HasSubstr("first"), HasSubstr("done")));
    EXPECT_THAT(lines[3], AllOf(StartsWith("2x2/replicate0 "), HasSubstr("second"), HasSubstr("done")));
    EXPECT_THAT(lines[4], AllOf(StartsWith("world "), HasSubstr("third"), HasSubstr("done")));
    EXPECT_THAT(lines[5], AllOf(StartsWith("2x2/shard1/near1from0 "), HasSubstr("fourth"), HasSubstr("done")));
    EXPECT_THAT(lines[6], AllOf(StartsWith("2x2/shard1 "), HasSubstr("last"), HasSubstr("failed")));
    EXPECT_THAT(
        lines.back(), StartsWith("not finished: all_gather of unit 'last' at step 7, number 2 of group 2x2/shard1: "));
    // Its groups went one after the other, and their collectives are there all the same.
    const auto guilty = lines_of(folder / file_of(3));
    ASSERT_THAT(guilty, SizeIs(7));
    EXPECT_THAT(lines_with(guilty, " done "), SizeIs(4));
    EXPECT_THAT(guilty.back(), HasSubstr("left by itself"));
  });
}

} // namespace
} // namespace ebb::comm
