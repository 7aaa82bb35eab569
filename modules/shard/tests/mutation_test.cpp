#include "support.h"

#include "engine.h"

#include <atomic>

// The tests of equality and of order are worth something only if a broken engine fails them.
namespace ebb::shard {
namespace {

using test::make_chain;
using test::make_subject;
using test::run_reference;
using test::shard_subject;
using test::wrap_everything;

constexpr int kRanks = 2;
constexpr int kMutatedSteps = 3;

// Ranks whose losses and gradients were those of the reference in every step, with `faults` put into the engine.
int ranks_equal_to_reference(Faults faults) {
  const auto reference = run_reference("gpt", kRanks, kMutatedSteps);
  std::atomic<int> equal{0};
  ebb::test::spawn_ranks(kRanks, [&](const auto& group) {
    auto subject = make_subject("gpt");
    auto model = shard_subject(subject, {.mesh = comm::Mesh(group), .wrap = wrap_everything()});
    model.engine().inject(faults);
    torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
    bool same = true;
    for (int step = 0; step < kMutatedSteps; ++step) {
      auto loss = subject.loss(step, group->rank());
      same = same && loss.template item<double>() == reference.losses[step][group->rank()];
      loss.backward();
      const auto layout = model.layout();
      const auto leaves = model.named_parameters();
      for (std::size_t i = 0; i < leaves.size(); ++i) {
        for (std::size_t j = 0; j < reference.parameters.size() && !layout[i].slices.empty(); ++j) {
          if (reference.parameters[j].first == leaves[i].first) {
            const auto whole = reference.grads[step][j].flatten();
            same = same &&
                   at::equal(
                       leaves[i].second.grad(), whole.narrow(0, layout[i].slices[0].begin, leaves[i].second.numel()));
          }
        }
      }
      optimizer.step();
      optimizer.zero_grad();
    }
    equal += same;
  });
  return equal;
}

TEST(Mutation, WithoutAFaultAllRanksAreEqual) {
  EXPECT_EQ(ranks_equal_to_reference({}), kRanks);
}

TEST(Mutation, ASkippedReduceIsSeen) {
  EXPECT_EQ(ranks_equal_to_reference({.skipped_reduce = 1}), 0);
}

TEST(Mutation, AGradientScaledByOnePercentIsSeen) {
  EXPECT_EQ(ranks_equal_to_reference({.scaled_gradient = 1}), 0);
}

TEST(Mutation, AWrongPrefetchKeepsTheValuesAndIsSeenInTheOrder) {
  EXPECT_EQ(ranks_equal_to_reference({.wrong_prefetch = true}), kRanks);
  const auto order = [](bool wrong) {
    auto chain = make_chain(5);
    auto model = fully_shard(chain, {.mesh = comm::Mesh(comm::single()), .wrap = wrap_by_size(1)});
    chain->forward(at::ones({2, 8})).sum().backward();
    model.engine().inject({.wrong_prefetch = wrong});
    model.engine().record_events(true);
    chain->forward(at::ones({2, 8})).sum().backward();
    return model.engine().take_events();
  };
  EXPECT_NE(order(true), order(false));
}

} // namespace
} // namespace ebb::shard
