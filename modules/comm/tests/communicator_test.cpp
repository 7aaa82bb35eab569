#include "ebb/comm/init.h"

#include "rank_values.h"
#include "support/spawn_ranks.h"

#include "ebb/base/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <c10/util/ScopeExit.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <barrier>
#include <cmath>
#include <functional>
#include <thread>

namespace ebb::comm {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

struct Case {
  int size;
  bool same_host_reads;
  std::string hosts; ///< A letter a rank; empty: all are on one host.
};

class Collectives : public ::testing::TestWithParam<Case> {
 protected:
  int size() const {
    return GetParam().size;
  }
  GroupOptions options(int rank) const {
    return {
        .timeout = std::chrono::seconds(60),
        .heartbeat = std::chrono::milliseconds(100),
        .host = GetParam().hosts.substr(GetParam().hosts.empty() ? 0 : rank, 1),
        .same_host_reads = GetParam().same_host_reads};
  }
  std::function<GroupOptions(int)> options_of() const {
    return [this](int rank) { return options(rank); };
  }
  void on_ranks(const std::function<void(Communicator&)>& body) const {
    test::spawn_ranks(
        size(), [&](const std::shared_ptr<Communicator>& group) { body(*group); }, options_of());
  }
};

std::string name_of_case(const ::testing::TestParamInfo<Case>& info) {
  const auto& hosts = info.param.hosts;
  return (info.param.same_host_reads ? "Reads" : "Sockets") + (hosts.empty() ? std::to_string(info.param.size) : hosts);
}

/// What only shows where there is a peer; of a group of one see Single.
class CollectivesOfSeveral : public Collectives {};

const std::vector<Case> kSeveral = {{2, false, ""},   {3, false, ""},     {4, false, ""},    {2, true, ""},
                                    {3, true, ""},    {4, true, ""},      {4, true, "aabb"}, {4, false, "aabb"},
                                    {3, true, "aab"}, {5, true, "aaabb"}, {4, true, "abab"}};

INSTANTIATE_TEST_SUITE_P(One, Collectives, ::testing::Values(Case{1, false, ""}), name_of_case);
INSTANTIATE_TEST_SUITE_P(All, Collectives, ::testing::ValuesIn(kSeveral), name_of_case);
INSTANTIATE_TEST_SUITE_P(All, CollectivesOfSeveral, ::testing::ValuesIn(kSeveral), name_of_case);

const std::vector<at::ScalarType> kSummedTypes = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};
const std::vector<std::int64_t> kCounts = {0, 1, 3, 1025, 70001};

TEST_P(Collectives, AllGatherConcatenatesInRankOrder) {
  on_ranks([&](Communicator& group) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kLong, at::kByte, at::kBool}) {
      for (const auto count : kCounts) {
        const auto input = values(group.rank(), count, at::kLong).to(dtype);
        const auto output = at::full({count * size()}, 7, at::TensorOptions(at::kLong)).to(dtype);
        group.all_gather(output, input, "unit")->wait();
        for (int rank = 0; rank < size(); ++rank) {
          EXPECT_TRUE(output.slice(0, rank * count, (rank + 1) * count).equal(values(rank, count, at::kLong).to(dtype)))
              << dtype << " x " << count << ", part of rank " << rank;
        }
      }
    }
  });
}

TEST_P(Collectives, AllGatherAcceptsTheOwnPartOfTheOutputAsInput) {
  on_ranks([&](Communicator& group) {
    const std::int64_t count = 4099;
    const auto output = at::zeros({count * size()});
    const auto own = output.slice(0, group.rank() * count, (group.rank() + 1) * count);
    own.copy_(values(group.rank(), count, at::kFloat));
    const auto work = group.all_gather(output, own, "unit");
    work->wait();
    for (int rank = 0; rank < size(); ++rank) {
      EXPECT_TRUE(output.slice(0, rank * count, (rank + 1) * count).equal(values(rank, count, at::kFloat)));
    }
    work->release();
  });
}

TEST_P(Collectives, ReduceScatterAddsInRankOrderAndDividesOnce) {
  on_ranks([&](Communicator& group) {
    for (const auto dtype : kSummedTypes) {
      for (const auto count : kCounts) {
        for (const double divisor : {double(size()), 0.7}) {
          const auto input = values(group.rank(), count * size(), dtype);
          const auto output = at::empty({count}, at::TensorOptions(dtype));
          group.reduce_scatter(output, input, divisor, "unit")->wait();
          const auto expected =
              summed(size(), count * size(), dtype, divisor).slice(0, group.rank() * count, (group.rank() + 1) * count);
          EXPECT_TRUE(output.equal(expected)) << dtype << " x " << count << " / " << divisor;
        }
      }
    }
  });
}

TEST_P(Collectives, ReduceScatterMayWriteIntoTheOwnPartOfItsInput) {
  on_ranks([&](Communicator& group) {
    const std::int64_t count = 70001;
    const auto input = values(group.rank(), count * size(), at::kFloat);
    const auto own = input.slice(0, group.rank() * count, (group.rank() + 1) * count);
    const auto work = group.reduce_scatter(own, input, size(), "unit");
    work->wait();
    EXPECT_TRUE(own.equal(
        summed(size(), count * size(), at::kFloat, size()).slice(0, group.rank() * count, (group.rank() + 1) * count)));
    work->release();
  });
}

TEST_P(Collectives, AllReduceSumIsTheSumInRankOrderAtEveryRank) {
  on_ranks([&](Communicator& group) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kLong, at::kInt}) {
      for (const auto count : kCounts) {
        const double divisor = at::isFloatingType(dtype) ? 3.0 : 1.0;
        const auto tensor = values(group.rank(), count, dtype);
        const auto work = group.all_reduce(tensor, ReduceOp::kSum, divisor, "unit");
        work->wait();
        EXPECT_TRUE(tensor.equal(summed(size(), count, dtype, divisor))) << dtype << " x " << count;
        work->release();
      }
    }
  });
}

TEST_P(Collectives, AllReduceMaxTakesTheLargestAndKeepsNaN) {
  on_ranks([&](Communicator& group) {
    for (const std::int64_t count : {5, 30011}) {
      auto tensor = values(group.rank(), count, at::kFloat);
      if (group.rank() == group.size() - 1) {
        tensor[1] = NAN;
      }
      auto expected = values(0, count, at::kFloat);
      for (int rank = 1; rank < size(); ++rank) {
        expected = at::maximum(expected, values(rank, count, at::kFloat));
      }
      const auto work = group.all_reduce(tensor, ReduceOp::kMax, 1, "unit");
      work->wait();
      EXPECT_TRUE(std::isnan(tensor[1].item<float>()));
      tensor[1] = 0;
      expected[1] = 0;
      EXPECT_TRUE(tensor.equal(expected));
      work->release();
    }
  });
}

TEST_P(Collectives, BroadcastCopiesTheTensorOfAnyRoot) {
  on_ranks([&](Communicator& group) {
    for (int root = 0; root < size(); ++root) {
      for (const auto count : kCounts) {
        const auto tensor = values(group.rank(), count, at::kDouble, root);
        const auto work = group.broadcast(tensor, root, "unit");
        work->wait();
        EXPECT_TRUE(tensor.equal(values(root, count, at::kDouble, root)));
        work->release();
      }
    }
  });
}

TEST_P(Collectives, ExchangeGivesEverybodysTextInRankOrder) {
  on_ranks([&](Communicator& group) {
    const auto text = [](int rank) { return std::string(static_cast<std::size_t>(rank * 5000), 'a' + rank) + '\0'; };
    const auto texts = group.exchange(text(group.rank()));
    ASSERT_EQ(texts.size(), static_cast<std::size_t>(size()));
    for (int rank = 0; rank < size(); ++rank) {
      EXPECT_EQ(texts[rank], text(rank));
    }
    EXPECT_EQ(group.exchange("").front(), "");
    EXPECT_THROW(group.exchange(std::string((1 << 20) + 1, 'x')), c10::ValueError);
  });
}

TEST_P(Collectives, BarrierLetsNobodyPassBeforeAllHaveCome) {
  std::atomic<int> arrived{0};
  on_ranks([&](Communicator& group) {
    for (int round = 1; round <= 20; ++round) {
      ++arrived;
      group.barrier();
      EXPECT_GE(arrived.load(), round * size());
    }
  });
}

TEST_P(Collectives, ManyOperationsInFlightEndInAnyOrderOfWaiting) {
  on_ranks([&](Communicator& group) {
    struct Flight {
      at::Tensor gathered, reduced, tensor;
      std::vector<std::unique_ptr<Work>> works;
    };
    const std::int64_t count = 5003;
    std::vector<Flight> flights;
    for (int i = 0; i < 12; ++i) {
      Flight flight{
          at::empty({count * size()}), at::empty({count}), values(group.rank(), count, at::kFloat, i + 100), {}};
      flight.works.push_back(group.all_gather(flight.gathered, values(group.rank(), count, at::kFloat, i), "gather"));
      flight.works.push_back(
          group.reduce_scatter(flight.reduced, values(group.rank(), count * size(), at::kFloat, i), 1, "reduce"));
      flight.works.push_back(group.all_reduce(flight.tensor, ReduceOp::kSum, 1, "all"));
      flights.push_back(std::move(flight));
    }
    for (int i = 11; i >= 0; --i) { // Newest first, by polling and by waiting.
      auto& flight = flights[i];
      for (auto& work : flight.works) {
        if (i % 2 == 0) {
          work->wait();
        } else {
          while (!work->poll()) {
            std::this_thread::yield();
          }
        }
      }
      for (int rank = 0; rank < size(); ++rank) {
        EXPECT_TRUE(
            flight.gathered.slice(0, rank * count, (rank + 1) * count).equal(values(rank, count, at::kFloat, i)));
      }
      EXPECT_TRUE(flight.reduced.equal(
          summed(size(), count * size(), at::kFloat, 1, i).slice(0, group.rank() * count, (group.rank() + 1) * count)));
      EXPECT_TRUE(flight.tensor.equal(summed(size(), count, at::kFloat, 1, i + 100)));
    }
    for (auto& flight : flights) {
      for (auto& work : flight.works) {
        work->release();
      }
    }
  });
}

TEST_P(Collectives, AfterReleaseTheInputMayBeOverwritten) {
  on_ranks([&](Communicator& group) {
    const std::int64_t count = 50000;
    const auto input = at::empty({count});
    const auto output = at::empty({count * size()});
    for (int round = 0; round < 30; ++round) {
      input.fill_(1000.0 * group.rank() + round);
      const auto work = group.all_gather(output, input, "unit");
      work->wait();
      work->release();
      input.fill_(-1);
      for (int rank = 0; rank < size(); ++rank) {
        EXPECT_TRUE((output.slice(0, rank * count, (rank + 1) * count) == 1000.0 * rank + round).all().item<bool>());
      }
    }
  });
}

TEST_P(Collectives, DroppedWorkLeavesTheGroupUsable) {
  on_ranks([&](Communicator& group) {
    const std::int64_t count = 30000;
    for (int round = 0; round < 8; ++round) {
      // Dropped with its tensors, at some ranks before the peers have even called.
      if ((group.rank() + round) % 2 == 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      group.all_gather(at::empty({count * size()}), values(group.rank(), count, at::kFloat), "dropped");
      group.all_reduce(values(group.rank(), count, at::kFloat), ReduceOp::kSum, 1, "dropped");
      group.reduce_scatter(at::empty({count}), values(group.rank(), count * size(), at::kFloat), 1, "dropped");
      const auto tensor = values(group.rank(), count, at::kFloat, round);
      const auto work = group.all_reduce(tensor, ReduceOp::kSum, 1, "kept");
      work->wait();
      EXPECT_TRUE(tensor.equal(summed(size(), count, at::kFloat, 1, round)));
      work->release();
    }
  });
}

TEST_P(Collectives, TrafficCountsCallsAndPayloadBytes) {
  on_ranks([&](Communicator& group) {
    const std::int64_t others = size() - 1;
    const auto large = at::zeros({1001 * size()});
    const auto small = at::zeros({1001});
    group.all_gather(large, small, "a")->wait();
    group.all_gather(large, small, "b")->wait();
    group.reduce_scatter(small, large, 1, "c")->wait();
    group.all_reduce(at::zeros({10}), ReduceOp::kSum, 1, "d")->wait();
    group.barrier();
    group.exchange("abc");
    const auto& traffic = group.traffic();
    EXPECT_EQ(traffic.calls_of(Op::kAllGather), 2);
    EXPECT_EQ(traffic.calls_of(Op::kReduceScatter), 1);
    EXPECT_EQ(traffic.calls_of(Op::kAllReduce), 1);
    EXPECT_EQ(traffic.calls_of(Op::kBarrier), 1);
    EXPECT_EQ(traffic.calls_of(Op::kExchange), 1);
    EXPECT_EQ(traffic.calls_of(Op::kBroadcast), 0);
    if (!GetParam().hosts.empty()) {
      return; // How it is spread over the ranks depends on the hosts: see HostTraffic.
    }
    EXPECT_EQ(traffic.total_bytes_across_hosts(), 0);
    EXPECT_EQ(traffic.bytes_sent[0], 2 * others * 4004);
    EXPECT_EQ(traffic.bytes_sent[1], others * 4004);
    EXPECT_EQ(traffic.bytes_sent[2], others * 40);
    EXPECT_EQ(traffic.total_bytes_sent(), others * (3 * 4004 + 40 + 3));
  });
}

TEST_P(Collectives, LargeAllReduceSendsTwiceTheOthersShare) {
  std::atomic<std::int64_t> sent{0};
  on_ranks([&](Communicator& group) {
    const auto tensor = at::zeros({100003});
    const auto work = group.all_reduce(tensor, ReduceOp::kSum, 1, "unit");
    work->wait();
    work->release();
    sent += group.traffic().total_bytes_sent();
  });
  EXPECT_EQ(sent.load(), 2 * (size() - 1) * 4 * 100003); // Over all ranks.
}

TEST_P(Collectives, BroadcastSendsOneCopyToEachOther) {
  std::atomic<std::int64_t> sent{0};
  on_ranks([&](Communicator& group) {
    const auto work = group.broadcast(at::zeros({1000}), 0, "unit");
    work->wait();
    work->release();
    sent += group.traffic().total_bytes_sent();
  });
  EXPECT_EQ(sent.load(), (size() - 1) * 4000);
}

TEST_P(Collectives, WrongArgumentsAreRefusedBeforeAnythingIsSent) {
  on_ranks([&](Communicator& group) {
    const auto n = size();
    EXPECT_THROW(group.all_gather(at::zeros({2 * n + 1}), at::zeros({2}), "u"), c10::ValueError);
    EXPECT_THROW(group.all_gather(at::zeros({2 * n}, at::kDouble), at::zeros({2}), "u"), c10::ValueError);
    EXPECT_THROW(group.all_gather(at::zeros({8 * n}).slice(0, 0, 8 * n, 2), at::zeros({4}), "u"), c10::ValueError);
    EXPECT_THROW(group.all_gather(at::zeros({n}), at::Tensor(), "u"), c10::ValueError);
    EXPECT_THROW(group.reduce_scatter(at::zeros({2}), at::zeros({2 * n + 1}), 1, "u"), c10::ValueError);
    EXPECT_THROW(group.reduce_scatter(at::zeros({2}), at::zeros({2 * n}), 0, "u"), c10::ValueError);
    EXPECT_THROW(group.all_reduce(at::zeros({2}, at::kBool), ReduceOp::kSum, 1, "u"), c10::ValueError);
    EXPECT_THROW(group.all_reduce(at::zeros({2}, at::kLong), ReduceOp::kSum, 2, "u"), c10::ValueError);
    EXPECT_THROW(group.broadcast(at::zeros({2}), n, "u"), c10::ValueError);
    EXPECT_EQ(group.traffic().total_bytes_sent(), 0);
    group.barrier();
  });
}

// Runs `body` at every rank and returns what each ended with; "" for a normal end.
std::vector<std::string> endings(
    int size, const std::function<GroupOptions(int)>& options_of,
    const std::function<void(const std::shared_ptr<Communicator>&)>& body) {
  std::vector<std::string> texts(size);
  test::spawn_ranks(
      size,
      [&](const std::shared_ptr<Communicator>& group) {
        try {
          body(group);
        } catch (const std::exception& error) {
          texts[group->rank()] = message_of(error);
          const auto* lost = dynamic_cast<const RankLostError*>(&error);
          texts[group->rank()] += lost ? " <lost " + std::to_string(lost->rank()) + ">" : "";
          group->abort();
        }
      },
      options_of);
  return texts;
}

TEST_P(Collectives, ARankThatThrowsEndsTheOthersWithAnErrorThatNamesIt) {
  const int guilty = size() - 1;
  const auto texts = endings(size(), options_of(), [&](const std::shared_ptr<Communicator>& group) {
    const auto tensor = at::zeros({200000});
    for (int step = 0; step < 3; ++step) {
      group->set_step(step);
      const auto work = group->all_reduce(tensor, ReduceOp::kSum, 1, "layers.3");
      work->wait();
      work->release();
      if (group->rank() == guilty && step == 1) {
        throw std::runtime_error("no more");
      }
    }
  });
  for (int rank = 0; rank < size(); ++rank) {
    if (rank == guilty) {
      EXPECT_EQ(texts[rank], "no more");
    } else {
      EXPECT_THAT(texts[rank], HasSubstr("[all_reduce] rank " + std::to_string(guilty)));
      EXPECT_THAT(texts[rank], HasSubstr("all_reduce of unit 'layers.3' at step "));
      EXPECT_THAT(texts[rank], HasSubstr("<lost " + std::to_string(guilty) + ">"));
    }
  }
}

TEST_P(CollectivesOfSeveral, AfterAnAbortEveryCallThrowsAtOnce) {
  std::barrier all_are_there(size());
  on_ranks([&](Communicator& group) {
    const auto early = group.all_gather(at::zeros({size()}), at::zeros({1}), "early");
    early->wait();
    all_are_there.arrive_and_wait();
    group.abort();
    group.abort();
    EXPECT_THROW(group.barrier(), RankLostError);
    EXPECT_THROW(group.exchange("x"), RankLostError);
    EXPECT_THROW(group.all_gather(at::zeros({size()}), at::zeros({1}), "late"), RankLostError);
    EXPECT_THROW(group.all_reduce(at::zeros({1}), ReduceOp::kSum, 1, "late"), RankLostError);
    early->wait(); // It had ended well.
  });
}

TEST_P(CollectivesOfSeveral, AbortFromAnotherThreadEndsAWait) {
  std::atomic<bool> ended{false};
  const auto texts = endings(size(), options_of(), [&](const std::shared_ptr<Communicator>& group) {
    group->barrier();
    if (group->rank() != 0) {
      while (!ended) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      return;
    }
    std::thread aborter([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      group->abort();
    });
    const auto join = c10::make_scope_exit([&] {
      aborter.join();
      ended = true;
    });
    group->all_gather(at::zeros({100 * size()}), at::zeros({100}), "never")->wait();
  });
  EXPECT_THAT(texts[0], HasSubstr("abort()"));
  EXPECT_THAT(texts[0], HasSubstr("all_gather of unit 'never'"));
}

TEST_P(CollectivesOfSeveral, DifferentSizesAreAnErrorThatStatesBoth) {
  for (const std::int64_t count : {10, 100000}) {
    const auto texts = endings(size(), options_of(), [&](const std::shared_ptr<Communicator>& group) {
      group->barrier();
      const std::int64_t mine = group->rank() == 1 ? count + 1 : count;
      group->all_gather(at::zeros({mine * size()}), at::zeros({mine}), group->rank() == 1 ? "odd" : "even")->wait();
    });
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_THAT(texts[rank], HasSubstr("differs between ranks")) << texts[rank];
      EXPECT_THAT(
          texts[rank], HasSubstr("all_gather of unit 'even', " + std::to_string(count * 4) + " bytes of Float"));
      EXPECT_THAT(
          texts[rank], HasSubstr("all_gather of unit 'odd', " + std::to_string(count * 4 + 4) + " bytes of Float"));
    }
  }
}

TEST_P(CollectivesOfSeveral, DifferentOperationsAreAnErrorThatStatesBoth) {
  const auto texts = endings(size(), options_of(), [&](const std::shared_ptr<Communicator>& group) {
    group->barrier();
    const auto large = at::zeros({1000 * size()});
    const auto small = at::zeros({1000});
    if (group->rank() == 0) {
      group->all_gather(large, small, "here")->wait();
    } else {
      group->reduce_scatter(small, large, 1, "there")->wait();
    }
  });
  for (const auto& text : texts) {
    EXPECT_THAT(text, HasSubstr("all_gather of unit 'here', 4000 bytes of Float"));
    EXPECT_THAT(
        text, HasSubstr("reduce_scatter of unit 'there', " + std::to_string(4000 * size()) + " bytes of Float"));
  }
}

TEST_P(CollectivesOfSeveral, ALatePeerIsATimeoutThatNamesIt) {
  const auto late = [this](int rank) {
    auto changed = options(rank);
    changed.timeout = std::chrono::milliseconds(700);
    return changed;
  };
  std::atomic<bool> timed_out{false};
  const auto texts = endings(size(), late, [&](const std::shared_ptr<Communicator>& group) {
    group->barrier();
    if (group->rank() == 1) {
      while (!timed_out) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      return;
    }
    try {
      group->all_gather(at::zeros({100 * size()}), at::zeros({100}), "layers.7")->wait();
    } catch (...) {
      timed_out = true;
      throw;
    }
  });
  EXPECT_THAT(texts[0], AnyOf(HasSubstr("waited"), HasSubstr("is lost"), HasSubstr("was lost")));
  EXPECT_THAT(texts[0], HasSubstr("all_gather of unit 'layers.7'"));
  EXPECT_THAT(texts[0], HasSubstr(size() == 2 ? "rank 1 (" : "rank "));
}

TEST(Single, AfterAnAbortEveryCallThrows) {
  const auto group = single();
  group->barrier();
  group->abort();
  EXPECT_THROW(group->barrier(), RankLostError);
  EXPECT_THROW(group->all_gather(at::zeros({1}), at::zeros({1}), "unit"), RankLostError);
}

} // namespace
} // namespace ebb::comm
