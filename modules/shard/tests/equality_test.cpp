#include "models.h"

#include "ebb/shard/fully_shard.h"
#include "support/spawn_ranks.h"

#include <gtest/gtest.h>

#include <map>
#include <mutex>

namespace ebb::shard {
namespace {

using test::make_subject;
using test::run_reference;

constexpr int kSteps = 10;

ShardedModel shard_subject(test::Subject& subject, ShardOptions options) {
  return subject.module ? fully_shard(*subject.module, std::move(options)) : fully_shard(*subject.script, std::move(options));
}

// Every module with parameters of its own is a unit.
WrapPolicy wrap_everything() {
  return wrap_by_size(1);
}

using Case = std::tuple<Strategy, int, std::string>;

class Equality : public ::testing::TestWithParam<Case> {};

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  const auto& [strategy, world_size, kind] = info.param;
  return std::string(name_of(strategy)) + "_" + std::to_string(world_size) + "ranks_" + kind;
}

TEST_P(Equality, LossesGradientsAndParametersAreBitEqualToOneUnshardedProcess) {
  const auto& [strategy, world_size, kind] = GetParam();
  const auto reference = run_reference(kind, world_size, kSteps);
  std::mutex mutex;
  ebb::test::spawn_ranks(world_size, [&, strategy = strategy, kind = kind](const auto& group) {
    auto subject = make_subject(kind);
    auto model = shard_subject(subject, {.mesh = comm::Mesh(group), .strategy = strategy, .wrap = wrap_everything()});
    torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
    std::map<std::string, std::size_t> index;
    for (std::size_t i = 0; i < reference.parameters.size(); ++i) {
      index[reference.parameters[i].first] = i;
    }
    const auto layout = model.layout();
    for (int step = 0; step < kSteps; ++step) {
      auto loss = subject.loss(step, group->rank());
      loss.backward();
      const std::lock_guard lock(mutex);
      ASSERT_EQ(loss.template item<double>(), reference.losses[step][group->rank()]) << "step " << step;
      const auto leaves = model.named_parameters();
      for (std::size_t i = 0; i < leaves.size(); ++i) {
        const auto& [name, leaf] = leaves[i];
        ASSERT_EQ(layout[i].name, name);
        ASSERT_TRUE(leaf.grad().defined()) << name;
        const auto whole = reference.grads[step][index.at(name)].flatten();
        const auto begin = layout[i].slices.empty() ? 0 : layout[i].slices[0].begin;
        const auto expected = whole.narrow(0, begin, leaf.numel());
        ASSERT_TRUE(at::equal(leaf.grad(), expected)) << name << " at step " << step << "\n" << leaf.grad() - expected;
      }
      optimizer.step();
      optimizer.zero_grad();
    }
    auto scope = model.full_parameters({.writeback = false});
    const std::lock_guard lock(mutex);
    const auto parameters = subject.parameters();
    ASSERT_EQ(parameters.size(), reference.parameters.size());
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_TRUE(at::equal(parameters[i].second, reference.parameters[i].second)) << parameters[i].first;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    All,
    Equality,
    ::testing::Combine(
        ::testing::Values(Strategy::kFullShard, Strategy::kShardGradOp, Strategy::kNoShard),
        ::testing::Values(1, 2, 3, 4),
        ::testing::Values("gpt", "mlp", "script")),
    case_name);

} // namespace
} // namespace ebb::shard
