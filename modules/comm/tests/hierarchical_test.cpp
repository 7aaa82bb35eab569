#include "ebb/comm/mesh.h"

#include "rank_values.h"
#include "support/spawn_ranks.h"

#include "ebb/base/error.h"
#include "ebb/comm/init.h"

#include "hierarchical_communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>

// Groups over several hosts, which here are names: the ranks are threads. What every group does is in
// communicator_test.cpp, which runs over hosts too.
namespace ebb::comm {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::function<GroupOptions(int)> on(const std::string& hosts, bool same_host_reads = true) {
  return [=](int rank) {
    return GroupOptions{
        .timeout = std::chrono::seconds(60),
        .heartbeat = std::chrono::milliseconds(100),
        .host = hosts.substr(rank, 1),
        .same_host_reads = same_host_reads};
  };
}

HostLayout layout_of(const std::string& hosts) {
  std::vector<std::string> names;
  for (const char host : hosts) {
    names.emplace_back(1, host);
  }
  return HostLayout(names);
}

TEST(HostLayout, SpreadsRailsOverTheRanksOfEachHost) {
  const auto layout = layout_of("aaabb");
  EXPECT_EQ(layout.num_hosts(), 2);
  EXPECT_EQ(layout.num_rails(), 3);
  EXPECT_THAT(layout.ranks_of(1), ElementsAre(3, 4));
  EXPECT_EQ(layout.local_index(4), 1);
  EXPECT_EQ(layout.carrier(0, 2), 2);
  EXPECT_EQ(layout.carrier(1, 2), 3); // The narrower host's first rank carries two.
  EXPECT_TRUE(layout.in_rank_order());
  EXPECT_EQ(layout.num_pairs_across(), 12);
  EXPECT_FALSE(layout_of("aba").in_rank_order());
  EXPECT_TRUE(layout_of("abc").in_rank_order());
}

TEST(HostLayout, PiecesCoverEverythingOnceAndAreNeitherTinyNorHuge) {
  for (const std::int64_t count : {0, 1, 63, 70001, 5000000}) {
    for (const int width : {2, 8}) {
      std::int64_t next = 0;
      const auto pieces = pieces_of(count, width, 2);
      for (const auto& piece : pieces) {
        EXPECT_EQ(piece.begin, next);
        next += piece.count;
        EXPECT_LE(piece.count * width, 1 << 20);
        EXPECT_TRUE(next == count || piece.count * width >= 60000);
      }
      EXPECT_EQ(next, count);
    }
  }
  EXPECT_GE(pieces_of(500000, 4, 2).size(), 16U); // So that two rails keep several hosts busy.
}

// The algorithms for all-gathers and for sums that a group over `hosts` says it uses.
std::pair<std::string, std::string> algorithms(const std::string& hosts, bool same_host_reads = true) {
  std::pair<std::string, std::string> said;
  test::spawn_ranks(
      static_cast<int>(hosts.size()),
      [&](const std::shared_ptr<Communicator>& group) {
        if (group->rank() == 0) {
          said = {group->capabilities().all_gather, group->capabilities().reduce_scatter};
        }
        group->barrier();
      },
      on(hosts, same_host_reads));
  return said;
}

TEST(Hosts, DecideOnTheAlgorithm) {
  const auto whole = algorithms("aabb");
  EXPECT_THAT(whole.first, AllOf(StartsWith("hierarchical: "), HasSubstr("reading peers' memory")));
  EXPECT_THAT(whole.second, StartsWith("hierarchical: "));
  EXPECT_THAT(algorithms("aabb", false).first, AllOf(StartsWith("hierarchical: "), HasSubstr("by sockets")));
  EXPECT_EQ(algorithms("aaaa").first, "read peers' memory");
  EXPECT_EQ(algorithms("abc").first, "direct send and receive");
  EXPECT_EQ(algorithms("abc").second, "direct send and receive, sum in rank order");
  const auto mixed = algorithms("abab");
  EXPECT_THAT(mixed.first, StartsWith("hierarchical: "));
  EXPECT_THAT(mixed.second, AllOf(StartsWith("direct"), HasSubstr("not neighbours")));
  const auto few = algorithms("aab");
  EXPECT_THAT(few.first, StartsWith("hierarchical: "));
  EXPECT_THAT(few.second, AllOf(StartsWith("direct"), HasSubstr("would send more")));
}

TEST(Hosts, DecideForEachDtypeWhatSendsLess) {
  EXPECT_TRUE(chain_is_shorter(Op::kReduceScatter, layout_of("aabb"), at::kFloat));
  EXPECT_TRUE(chain_is_shorter(Op::kAllReduce, layout_of("aab"), at::kFloat));
  EXPECT_FALSE(chain_is_shorter(Op::kReduceScatter, layout_of("aab"), at::kFloat));
  EXPECT_FALSE(chain_is_shorter(Op::kReduceScatter, layout_of("aabb"), at::kBFloat16)); // Sums cross as float.
  EXPECT_TRUE(chain_is_shorter(Op::kReduceScatter, layout_of("aaaabbbb"), at::kBFloat16));
  EXPECT_FALSE(chain_is_shorter(Op::kAllReduce, layout_of("abab"), at::kFloat));
}

// What the ranks of each host sent to other hosts in `body`.
std::map<char, std::int64_t> bytes_across(
    const std::string& hosts, const std::function<std::unique_ptr<Work>(Communicator&)>& body) {
  std::map<char, std::int64_t> sent;
  std::mutex mutex;
  test::spawn_ranks(
      static_cast<int>(hosts.size()),
      [&](const std::shared_ptr<Communicator>& group) {
        body(*group)->release();
        const std::lock_guard lock(mutex);
        sent[hosts[group->rank()]] += group->traffic().total_bytes_across_hosts();
      },
      on(hosts));
  return sent;
}

using PerHost = std::map<char, std::int64_t>;
constexpr std::int64_t kCount = 50021; // Of a rank's part.
constexpr std::int64_t kBytes = 4 * kCount;

TEST(HostTraffic, AShardCrossesToEachOtherHostOnce) {
  const auto gather = [](Communicator& group) {
    return group.all_gather(at::empty({kCount * group.size()}), at::ones({kCount}), "unit");
  };
  EXPECT_EQ(bytes_across("aabb", gather), (PerHost{{'a', 2 * kBytes}, {'b', 2 * kBytes}}));
  EXPECT_EQ(bytes_across("aabbcc", gather), (PerHost{{'a', 4 * kBytes}, {'b', 4 * kBytes}, {'c', 4 * kBytes}}));
  EXPECT_EQ(bytes_across("aaabb", gather), (PerHost{{'a', 3 * kBytes}, {'b', 2 * kBytes}}));
  EXPECT_EQ(bytes_across("abab", gather), (PerHost{{'a', 2 * kBytes}, {'b', 2 * kBytes}}));
}

TEST(HostTraffic, ASumCrossesOnceAndItsResultsGoBack) {
  const auto scatter = [](Communicator& group) {
    return group.reduce_scatter(at::empty({kCount}), at::ones({kCount * group.size()}), 1, "unit");
  };
  EXPECT_EQ(bytes_across("aabb", scatter), (PerHost{{'a', 4 * kBytes}, {'b', 2 * kBytes}}));
  EXPECT_EQ(bytes_across("aabbcc", scatter), (PerHost{{'a', 6 * kBytes}, {'b', 6 * kBytes}, {'c', 4 * kBytes}}));
  // Directly, for comparison: each rank sends a part to each rank elsewhere.
  EXPECT_EQ(bytes_across("abab", scatter), (PerHost{{'a', 4 * kBytes}, {'b', 4 * kBytes}}));
  EXPECT_EQ(bytes_across("aab", scatter), (PerHost{{'a', 2 * kBytes}, {'b', 2 * kBytes}}));
}

TEST(HostTraffic, AnAllReduceCrossesOnceEachWay) {
  const auto reduce = [](Communicator& group) {
    return group.all_reduce(at::ones({kCount}), ReduceOp::kSum, 1, "unit");
  };
  EXPECT_EQ(bytes_across("aabb", reduce), (PerHost{{'a', kBytes}, {'b', kBytes}}));
  EXPECT_EQ(bytes_across("aaabb", reduce), (PerHost{{'a', kBytes}, {'b', kBytes}}));
  EXPECT_EQ(bytes_across("aabbcc", reduce), (PerHost{{'a', kBytes}, {'b', 2 * kBytes}, {'c', kBytes}}));
  const auto half = [](Communicator& group) {
    return group.all_reduce(at::ones({kCount}, at::kBFloat16), ReduceOp::kSum, 1, "unit");
  };
  EXPECT_EQ(bytes_across("aabb", half), (PerHost{{'a', kBytes}, {'b', kBytes / 2}})); // Sums cross as float.
}

TEST(HostTraffic, ABroadcastReachesEachOtherHostOnce) {
  for (const int root : {0, 3}) {
    const auto broadcast = [root](Communicator& group) { return group.broadcast(at::ones({kCount}), root, "unit"); };
    const bool first = root == 0;
    EXPECT_EQ(bytes_across("aabb", broadcast), (PerHost{{'a', first ? kBytes : 0}, {'b', first ? 0 : kBytes}}));
  }
  const auto broadcast = [](Communicator& group) { return group.broadcast(at::ones({kCount}), 2, "unit"); };
  EXPECT_EQ(bytes_across("aabbcc", broadcast), (PerHost{{'a', 0}, {'b', kBytes}, {'c', kBytes}}));
}

class HostsOver : public ::testing::TestWithParam<std::pair<std::string, bool>> {
 protected:
  const std::string& hosts() const {
    return GetParam().first;
  }
  int size() const {
    return static_cast<int>(hosts().size());
  }
  void on_ranks(const std::function<void(const std::shared_ptr<Communicator>&)>& body) const {
    test::spawn_ranks(size(), body, on(hosts(), GetParam().second));
  }
};
INSTANTIATE_TEST_SUITE_P(
    Of, HostsOver,
    ::testing::Values(
        std::pair{std::string("aabbcc"), true}, std::pair{std::string("aabbcc"), false},
        std::pair{std::string("abbccc"), true}, std::pair{std::string("aaabbb"), true}),
    [](const auto& info) { return info.param.first + (info.param.second ? "Reads" : "Sockets"); });

// Long enough for several pieces a rail, and all kinds of operations in flight, so that they overtake each other.
TEST_P(HostsOver, ManyPiecesInFlightHaveTheBitsOfTheSumInRankOrder) {
  on_ranks([&](const std::shared_ptr<Communicator>& group) {
    const int rank = group->rank();
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble, at::kLong}) {
      const std::int64_t count = 60013;
      const double divisor = at::isFloatingType(dtype) ? 3 : 1;
      const auto gathered = at::empty({count * size()}, dtype);
      const auto part = at::empty({count}, dtype);
      const auto all = values(rank, 4 * count, dtype, 7);
      const auto spread = values(rank, 4 * count, dtype, 8);
      std::vector<std::unique_ptr<Work>> works;
      works.push_back(group->all_reduce(all, ReduceOp::kSum, divisor, "all"));
      works.push_back(group->reduce_scatter(part, values(rank, count * size(), dtype), divisor, "part"));
      works.push_back(group->broadcast(spread, size() - 1, "spread"));
      works.push_back(group->all_gather(gathered, values(rank, count, dtype), "gathered"));
      for (auto work = works.rbegin(); work != works.rend(); ++work) {
        (*work)->release();
      }
      EXPECT_TRUE(all.equal(summed(size(), 4 * count, dtype, divisor, 7))) << dtype;
      EXPECT_TRUE(part.equal(summed(size(), count * size(), dtype, divisor).slice(0, rank * count, (rank + 1) * count)))
          << dtype;
      EXPECT_TRUE(spread.equal(values(size() - 1, 4 * count, dtype, 8))) << dtype;
      for (int source = 0; source < size(); ++source) {
        EXPECT_TRUE(gathered.slice(0, source * count, (source + 1) * count).equal(values(source, count, dtype)))
            << dtype << ", rank " << source;
      }
    }
  });
}

TEST_P(HostsOver, ARankThatLeavesInTheMiddleIsNamedAtEveryHost) {
  for (int guilty = 0; guilty < size(); ++guilty) {
    std::vector<int> named(size(), -2);
    on_ranks([&](const std::shared_ptr<Communicator>& group) {
      const auto tensor = at::ones({400000});
      try {
        group->all_reduce(tensor, ReduceOp::kSum, size(), "early")->release();
        if (group->rank() == guilty) {
          const auto late = group->all_reduce(tensor, ReduceOp::kSum, 1, "late"); // Its memory is read when it leaves.
          group->abort();
          return;
        }
        for (int i = 0; i < 3; ++i) { // The others may still have been in the first.
          group->all_reduce(tensor, ReduceOp::kSum, 1, "late")->wait();
        }
      } catch (const RankLostError& error) {
        named[group->rank()] = error.rank();
      }
    });
    named[guilty] = guilty;
    EXPECT_THAT(named, Each(guilty));
  }
}

TEST(Hosts, RanksThatDisagreeOnTheDtypeAreToldSo) {
  std::vector<std::string> texts(4);
  test::spawn_ranks(
      4,
      [&](const std::shared_ptr<Communicator>& group) {
        group->barrier();
        const auto tensor = at::ones({20000}, group->rank() == 2 ? at::kInt : at::kFloat);
        try {
          group->all_reduce(tensor, ReduceOp::kSum, 1, "unit")->wait();
        } catch (const std::exception& error) {
          texts[group->rank()] = message_of(error);
        }
      },
      on("aabb"));
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("80000 bytes of Float"), HasSubstr("80000 bytes of Int"))));
}

TEST(Hosts, AxesOfAMeshFollowTheHosts) {
  test::spawn_ranks(
      4,
      [](const std::shared_ptr<Communicator>& world) {
        const auto mesh = Mesh::replicate_by_shard(world, 2, 2);
        EXPECT_EQ(mesh.axis("shard")->capabilities().all_gather, "read peers' memory");
        EXPECT_EQ(mesh.axis("replicate")->capabilities().all_gather, "direct send and receive");
        const auto whole = Mesh::replicate_by_shard(world, 1, 4);
        EXPECT_THAT(whole.axis("shard")->capabilities().all_gather, StartsWith("hierarchical: "));
        const auto tensor = values(world->rank(), 30000, at::kFloat);
        whole.axis("shard")->all_reduce(tensor, ReduceOp::kSum, 4, "unit")->release();
        EXPECT_TRUE(tensor.equal(summed(4, 30000, at::kFloat, 4)));
      },
      on("aabb"));
}

TEST(Hosts, ANameOfSeveralLinesIsRefused) {
  EXPECT_THROW(
      test::spawn_ranks(
          2, [](const std::shared_ptr<Communicator>&) {}, GroupOptions{.host = "a\nb"}),
      c10::ValueError);
}

} // namespace
} // namespace ebb::comm
