#include "support.h"

#include <map>
#include <mutex>

namespace ebb::shard {
namespace {

using test::expect_parameters;
using test::make_chain;
using test::make_subject;
using test::run_reference;
using test::shard_subject;
using test::wrap_everything;
using ::testing::HasSubstr;

using Case = std::tuple<Strategy, int, std::string>;

class Hybrid : public ::testing::TestWithParam<Case> {};

TEST_P(Hybrid, IsBitEqualToOneUnshardedProcessThatSumsGroupByGroup) {
  constexpr int kRanks = 4;
  constexpr int kSteps = 5;
  const auto& [strategy, replicas, kind] = GetParam();
  const auto reference = run_reference(
      kind, kRanks, kSteps, /*clip=*/0, strategy == Strategy::kNoShard ? 1 : replicas); // whole: over all ranks at once
  std::mutex mutex;
  ebb::test::spawn_ranks(kRanks, [&, strategy = strategy, replicas = replicas, kind = kind](const auto& group) {
    auto subject = make_subject(kind);
    const auto mesh = comm::Mesh::replicate_by_shard(group, replicas, kRanks / replicas);
    auto model = shard_subject(subject, {.mesh = mesh, .strategy = strategy, .wrap = wrap_everything()});
    torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
    for (int step = 0; step < kSteps; ++step) {
      auto loss = subject.loss(step, group->rank());
      loss.backward();
      ASSERT_EQ(loss.template item<double>(), reference.losses[step][group->rank()]) << "step " << step;
      optimizer.step();
      optimizer.zero_grad();
    }
    auto scope = model.full_parameters({.writeback = false});
    const std::lock_guard lock(mutex);
    expect_parameters(subject, reference);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Factorisations, Hybrid,
    ::testing::Combine(
        ::testing::Values(Strategy::kHybridShard, Strategy::kHybridShardZero2, Strategy::kNoShard),
        ::testing::Values(1, 2, 4), ::testing::Values("gpt", "mlp", "script")),
    [](const auto& info) {
      const auto replicas = std::get<1>(info.param);
      return std::string(name_of(std::get<0>(info.param))) + "_" + std::to_string(replicas) + "x" +
             std::to_string(4 / replicas) + "_" + std::get<2>(info.param);
    });

TEST(HybridShard, ReducesInsideAndThenAcrossOnceAUnit) {
  ebb::test::spawn_ranks(4, [](const auto& group) {
    auto chain = make_chain(3);
    const auto mesh = comm::Mesh::replicate_by_shard(group, 2, 2);
    auto model = fully_shard(chain, {.mesh = mesh, .strategy = Strategy::kHybridShard, .wrap = wrap_by_size(1)});
    const auto calls = [&](const char* axis, comm::Op op) { return mesh.axis(axis)->traffic().calls_of(op); };
    const auto scattered = calls("shard", comm::Op::kReduceScatter);
    const auto reduced = calls("replicate", comm::Op::kAllReduce);
    chain->forward(at::ones({2, 8})).sum().backward();
    EXPECT_EQ(calls("shard", comm::Op::kReduceScatter) - scattered, 3);
    EXPECT_EQ(calls("replicate", comm::Op::kAllReduce) - reduced, 3);
    EXPECT_EQ(calls("replicate", comm::Op::kAllGather), 0);
    EXPECT_EQ(model.stats().all_reduces, 3);
  });
}

TEST(HybridShard, HalfSumsStayFiniteBetweenTheTwoCollectives) {
  ebb::test::spawn_ranks(4, [](const auto& group) {
    auto chain = make_chain(1);
    const auto mesh = comm::Mesh::replicate_by_shard(group, 2, 2);
    auto model = fully_shard(
        chain, {.mesh = mesh,
                .strategy = Strategy::kHybridShard,
                .wrap = wrap_by_size(1),
                .mixed_precision = {.reduce_dtype = at::kHalf}});
    (chain->forward(at::ones({1, 8})) * 40000).sum().backward(); // two of these are beyond float16's 65504
    for (const auto& leaf : model.parameters()) {
      EXPECT_TRUE(at::equal(leaf.grad(), at::full_like(leaf, 40000).detach())) << leaf.grad();
    }
  });
}

TEST(HybridShard, NeedsAMeshOfTwoAxes) {
  auto chain = make_chain(1);
  EXPECT_THAT(
      test::error_of(
          [&] { (void)fully_shard(chain, {.mesh = comm::Mesh(comm::single()), .strategy = Strategy::kHybridShard}); }),
      ::testing::AllOf(HasSubstr("hybrid_shard needs a mesh"), HasSubstr("replicate_by_shard")));
}

TEST(HybridShard, ClipsByTheNormOfTheWholeGradient) {
  const auto reference = run_reference("mlp", 4, 1, /*clip=*/0.01, 2);
  ebb::test::spawn_ranks(4, [&](const auto& group) {
    auto subject = make_subject("mlp");
    const auto mesh = comm::Mesh::replicate_by_shard(group, 2, 2);
    auto model = shard_subject(subject, {.mesh = mesh, .strategy = Strategy::kHybridShard, .wrap = wrap_everything()});
    subject.loss(0, group->rank()).backward();
    model.clip_grad_norm_(0.01);
    double squares = 0;
    for (const auto& leaf : model.parameters()) {
      squares += leaf.grad().pow(2).sum().template item<double>();
    }
    auto total = at::full({1}, squares, at::kDouble);
    mesh.axis("shard")->all_reduce(total, comm::ReduceOp::kSum, 1, "")->wait();
    EXPECT_NEAR(std::sqrt(total.template item<double>()), 0.01, 1e-6);
  });
}

} // namespace
} // namespace ebb::shard
