#include "support.h"

#include <algorithm>
#include <utility>

namespace ebb::shard {
namespace {

using test::make_subject;
using test::shard_subject;
using test::wrap_everything;

constexpr int kHybridMicros = 3;

// Each group's micro-batches summed over its ranks and then over micro-batches, the groups in order, divided once.
std::vector<at::Tensor> summed_group_by_group(const std::string& kind, int ranks, int groups) {
  auto subject = make_subject(kind);
  const auto take = [&] {
    std::vector<at::Tensor> grads;
    for (const auto& [name, tensor] : subject.parameters()) {
      grads.push_back(std::exchange(tensor.mutable_grad(), at::Tensor()));
    }
    return grads;
  };
  const auto add = [](std::vector<at::Tensor>& sums, const std::vector<at::Tensor>& more) {
    for (std::size_t i = 0; i < more.size(); ++i) {
      sums.size() <= i ? sums.push_back(more[i]) : void(sums[i] = sums[i] + more[i]);
    }
  };
  std::vector<at::Tensor> total;
  for (int replica = 0; replica < groups; ++replica) {
    std::vector<at::Tensor> of_group;
    for (int micro = 0; micro < kHybridMicros; ++micro) {
      std::vector<at::Tensor> of_micro;
      for (int rank = replica * (ranks / groups); rank < (replica + 1) * (ranks / groups); ++rank) {
        subject.loss(micro, rank).backward();
        add(of_micro, take());
      }
      add(of_group, of_micro);
    }
    add(total, of_group);
  }
  for (auto& sum : total) {
    sum = sum / ranks;
  }
  return total;
}

void expect_leaf_gradients(ShardedModel& model, test::Subject& subject, const std::vector<at::Tensor>& expected) {
  const auto layout = model.layout();
  const auto named = subject.parameters();
  for (const auto& [name, leaf] : model.named_parameters()) {
    const auto at = std::find_if(layout.begin(), layout.end(), [&](const auto& part) { return part.name == name; });
    const auto i = std::find_if(named.begin(), named.end(), [&](const auto& entry) { return entry.first == name; });
    const auto begin = at->slices.empty() ? 0 : at->slices[0].begin;
    ASSERT_TRUE(leaf.grad().defined()) << name;
    EXPECT_TRUE(at::equal(leaf.grad(), expected[i - named.begin()].flatten().narrow(0, begin, leaf.numel()))) << name;
  }
}

bool shows_gradients(const ShardedModel& model) {
  const auto leaves = model.parameters();
  return std::any_of(leaves.begin(), leaves.end(), [](const auto& leaf) { return leaf.grad().defined(); });
}

struct Shape {
  int replicate;
  int shard;
};

class RequiresAllReduce : public ::testing::TestWithParam<std::tuple<Shape, std::string>> {};

TEST_P(RequiresAllReduce, OffAddsUpShardsAndTheNextBackwardReducesAcross) {
  const auto& [shape, kind] = GetParam();
  const int ranks = shape.replicate * shape.shard;
  const auto expected = summed_group_by_group(kind, ranks, shape.replicate);
  ebb::test::spawn_ranks(ranks, [&, shape = shape, kind = kind](const auto& world) {
    auto subject = make_subject(kind);
    const auto mesh = comm::Mesh::replicate_by_shard(world, shape.replicate, shape.shard);
    auto model = shard_subject(subject, {.mesh = mesh, .strategy = Strategy::kHybridShard, .wrap = wrap_everything()});
    const auto units = static_cast<std::int64_t>(model.units().size());
    const auto calls = [&](const comm::Communicator& group, comm::Op op) { return group.traffic().calls_of(op); };
    for (int repeat = 0; repeat < 2; ++repeat) {
      for (int micro = 0; micro < kHybridMicros; ++micro) {
        const bool last = micro + 1 == kHybridMicros;
        model.set_requires_all_reduce(last);
        const auto scattered = calls(*mesh.axis("shard"), comm::Op::kReduceScatter);
        const auto across = calls(*mesh.axis("replicate"), comm::Op::kAllReduce);
        const auto everywhere = calls(*world, comm::Op::kAllReduce);
        subject.loss(micro, world->rank()).backward();
        EXPECT_EQ(calls(*mesh.axis("shard"), comm::Op::kReduceScatter) - scattered, units);
        EXPECT_EQ(calls(*mesh.axis("replicate"), comm::Op::kAllReduce) - across, last ? units : 0);
        EXPECT_EQ(calls(*world, comm::Op::kAllReduce) - everywhere, last ? 1 : 0); // which gradients exist
        EXPECT_EQ(shows_gradients(model), last);
      }
      expect_leaf_gradients(model, subject, expected);
      model.zero_grad();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    All, RequiresAllReduce,
    ::testing::Combine(::testing::Values(Shape{2, 1}, Shape{2, 2}, Shape{4, 1}), ::testing::Values("mlp", "gpt")),
    [](const auto& info) {
      const auto& shape = std::get<0>(info.param);
      return std::to_string(shape.replicate) + "x" + std::to_string(shape.shard) + "_" + std::get<1>(info.param);
    });

TEST(RequiresAllReduceOf, SomeUnitsAndWhatZeroGradDrops) {
  ebb::test::spawn_ranks(4, [](const auto& world) {
    auto subject = make_subject("mlp");
    const auto mesh = comm::Mesh::replicate_by_shard(world, 2, 2);
    auto model = shard_subject(subject, {.mesh = mesh, .wrap = wrap_everything()});
    model.set_requires_all_reduce({"b"}, false);
    subject.loss(0, world->rank()).backward();
    for (const auto& [name, leaf] : model.named_parameters()) {
      EXPECT_EQ(leaf.grad().defined(), name.rfind("b.", 0) != 0) << name;
    }
    model.zero_grad();
    model.set_requires_all_reduce(true);
    subject.loss(1, world->rank()).backward();
    auto other = make_subject("mlp");
    auto fresh = shard_subject(other, {.mesh = mesh, .wrap = wrap_everything()});
    other.loss(1, world->rank()).backward();
    for (std::size_t i = 0; i < model.parameters().size(); ++i) {
      EXPECT_TRUE(at::equal(model.parameters()[i].grad(), fresh.parameters()[i].grad())) << i;
    }
  });
}

} // namespace
} // namespace ebb::shard
