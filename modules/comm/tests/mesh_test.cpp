#include "ebb/comm/mesh.h"

#include "support/spawn_ranks.h"

#include "ebb/base/error.h"
#include "ebb/comm/init.h"
#include "support/complaint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/torch.h>

namespace ebb::comm {
namespace {

using ebb::test::complaint;

using ::testing::ElementsAre;
using ::testing::HasSubstr;

enum class Links { kSockets, kReads, kHosts };

// kHosts: ranks 0 and 1 on one host, 2 and 3 on another.
std::function<GroupOptions(int)> options(Links way) {
  return [way](int rank) {
    GroupOptions options{
        .timeout = std::chrono::seconds(60),
        .heartbeat = std::chrono::milliseconds(100),
        .same_host_reads = way != Links::kSockets};
    if (way == Links::kHosts) {
      options.host = rank < 2 ? "a" : "b";
    }
    return options;
  };
}

TEST(Mesh, OneAxisIsTheWorld) {
  const auto world = single();
  const Mesh mesh(world);
  EXPECT_THAT(mesh.axes(), ElementsAre("shard"));
  EXPECT_TRUE(mesh.has_axis("shard"));
  EXPECT_FALSE(mesh.has_axis("replicate"));
  EXPECT_EQ(mesh.axis("shard"), world);
  EXPECT_EQ(mesh.world(), world);
}

TEST(Mesh, AnUnknownAxisIsAnErrorThatListsTheAxes) {
  const Mesh mesh(single());
  EXPECT_THAT(complaint([&] { mesh.axis("pipeline"); }), HasSubstr("expected one of 'shard', got 'pipeline'"));
  EXPECT_THROW(Mesh(nullptr), c10::ValueError);
}

TEST(Mesh, FactorsThatDoNotMultiplyToTheWorldAreRefused) {
  EXPECT_THAT(
      complaint([] { Mesh::replicate_by_shard(single(), 2, 2); }),
      HasSubstr("replicate x shard must equal the number of ranks, got 2 x 2"));
  EXPECT_THROW(Mesh::replicate_by_shard(single(), 0, 1), c10::ValueError);
}

TEST(Mesh, TwoAxesOverOneRankWork) {
  const auto mesh = Mesh::replicate_by_shard(single(), 1, 1);
  EXPECT_THAT(mesh.axes(), ElementsAre("replicate", "shard"));
  EXPECT_EQ(mesh.axis("replicate")->size(), 1);
}

class MeshOver : public ::testing::TestWithParam<Links> {};
INSTANTIATE_TEST_SUITE_P(
    Algorithm, MeshOver, ::testing::Values(Links::kSockets, Links::kReads, Links::kHosts), [](const auto& info) {
      return info.param == Links::kSockets ? "Sockets" : info.param == Links::kReads ? "Reads" : "Hosts";
    });

TEST_P(MeshOver, AxesAreGroupsOfTheRightRanksInOrder) {
  for (const auto& [replicate, shard] : {std::pair{2, 2}, {1, 4}, {4, 1}}) {
    test::spawn_ranks(
        4,
        [&, replicate = replicate, shard = shard](const std::shared_ptr<Communicator>& world) {
          const auto mesh = Mesh::replicate_by_shard(world, replicate, shard);
          EXPECT_EQ(mesh.world(), world);
          const auto& rows = mesh.axis("shard");
          const auto& columns = mesh.axis("replicate");
          ASSERT_EQ(rows->size(), shard);
          ASSERT_EQ(columns->size(), replicate);
          EXPECT_EQ(rows->rank(), world->rank() % shard);
          EXPECT_EQ(columns->rank(), world->rank() / shard);

          const auto own = at::full({1}, world->rank(), at::kLong);
          auto gathered = at::empty({shard}, at::kLong);
          rows->all_gather(gathered, own, "row")->wait();
          EXPECT_TRUE(gathered.equal(at::arange(shard, at::kLong) + world->rank() / shard * shard));
          gathered = at::empty({replicate}, at::kLong);
          columns->all_gather(gathered, own, "column")->wait();
          EXPECT_TRUE(gathered.equal(at::arange(replicate, at::kLong) * shard + world->rank() % shard));
        },
        options(GetParam()));
  }
}

TEST_P(MeshOver, ReduceScatterInRowsThenAllReduceInColumnsIsTheSumOverTheWorld) {
  test::spawn_ranks(
      4,
      [](const std::shared_ptr<Communicator>& world) {
        const auto mesh = Mesh::replicate_by_shard(world, 2, 2);
        const auto gradient = at::arange(20000, at::kDouble) * (world->rank() + 1);
        const auto part = at::empty({10000}, at::kDouble);
        mesh.axis("shard")->reduce_scatter(part, gradient, 1, "unit")->wait();
        mesh.axis("replicate")->all_reduce(part, ReduceOp::kSum, 4, "unit")->wait();
        const auto begin = 10000 * mesh.axis("shard")->rank();
        EXPECT_TRUE(part.equal((at::arange(20000, at::kDouble) * 2.5).slice(0, begin, begin + 10000)));
      },
      options(GetParam()));
}

TEST_P(MeshOver, ManyMeshesOfOneWorldDoNotMeet) {
  test::spawn_ranks(
      2,
      [](const std::shared_ptr<Communicator>& world) {
        std::vector<Mesh> meshes;
        for (int i = 0; i < 3; ++i) {
          meshes.push_back(Mesh::replicate_by_shard(world, 1, 2));
        }
        for (int i = 2; i >= 0; --i) {
          const auto tensor = at::full({3}, i + world->rank());
          const auto work = meshes[i].axis("shard")->all_reduce(tensor, ReduceOp::kSum, 1, "unit");
          work->wait();
          work->release();
          EXPECT_EQ(tensor[0].item<int>(), 2 * i + 1);
        }
      },
      options(GetParam()));
}

TEST_P(MeshOver, AbortOfTheWorldEndsItsAxes) {
  test::spawn_ranks(
      4,
      [](const std::shared_ptr<Communicator>& world) {
        const auto mesh = Mesh::replicate_by_shard(world, 2, 2);
        if (world->rank() == 3) {
          world->abort();
        }
        const auto& group = world->rank() % 2 == 1 ? mesh.axis("replicate") : mesh.axis("shard");
        if (world->rank() == 0) {
          return; // Its row is {0, 1} and its column {0, 2}: nobody it waits for is gone.
        }
        EXPECT_THROW(
            for (int i = 0; i < 100; ++i) { group->barrier(); }, RankLostError);
      },
      options(GetParam()));
}

} // namespace
} // namespace ebb::comm
