#include "ebb/shard/join.h"

#include "reported_support.h"

namespace ebb::shard {
namespace {

using test::backward_of_all_ranks;
using test::batch;
using test::error_of;
using test::expect_gradients;
using test::expect_parameters;
using test::make_chain;
using ::testing::AllOf;
using ::testing::HasSubstr;

// The middle one of three layers: used, skipped as if it returned its input, or skipped but looked at.
enum class Middle { kUsed, kSkipped, kLookedAt };

at::Tensor loss_of(torch::nn::Sequential chain, Middle middle, const at::Tensor& input) {
  auto x = at::tanh(test::layer(chain, 0).forward(input));
  auto& layer = test::layer(chain, 1);
  if (middle == Middle::kUsed) {
    x = at::tanh(layer.forward(x));
  } else if (middle == Middle::kLookedAt) {
    EXPECT_GT(layer.weight.norm().item<float>(), 0);
  }
  return test::layer(chain, 2).forward(x).pow(2).mean();
}

// PyTorch issues 83107, 83129
TEST(UnusedParameters, AUnitThatAnIterationLeavesOutIsShardedAgainAndKeepsNoGradient) {
  for (const auto strategy : {Strategy::kFullShard, Strategy::kShardGradOp, Strategy::kNoShard}) {
    ebb::test::spawn_ranks(2, [&](const auto& group) {
      auto chain = make_chain(3);
      auto plain = make_chain(3);
      auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .strategy = strategy, .wrap = wrap_by_size(1)});
      const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
      torch::optim::SGD optimizer(model.parameters(), options);
      torch::optim::SGD reference(plain->parameters(), options);
      int step = 0;
      for (const auto middle :
           {Middle::kUsed, Middle::kSkipped, Middle::kUsed, Middle::kLookedAt, Middle::kSkipped, Middle::kUsed}) {
        backward_of_all_ranks(*plain, 2, [&](int rank) { return loss_of(plain, middle, batch(rank, step)); });
        loss_of(chain, middle, batch(group->rank(), step)).backward();
        expect_gradients(model, *plain);
        if (strategy != Strategy::kNoShard) {
          EXPECT_EQ(model.residency().held_bytes, 0) << "step " << step;
        }
        optimizer.step();
        optimizer.zero_grad();
        reference.step();
        reference.zero_grad();
        ++step;
      }
      expect_parameters(model, *chain, *plain);
    });
  }
}

// PyTorch issues 126616, 148334
TEST(UnusedParameters, AUnitThatOneRankLeavesOutIsNamedOnEveryRank) {
  std::vector<std::string> errors(3);
  ebb::test::spawn_ranks(3, [&](const auto& group) {
    auto chain = make_chain(3);
    auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1)});
    const auto middle = group->rank() == 1 ? Middle::kSkipped : Middle::kUsed;
    errors[group->rank()] = error_of([&] { loss_of(chain, middle, batch(group->rank())).backward(); });
  });
  for (const auto& error : errors) {
    EXPECT_THAT(error, AllOf(HasSubstr("unit '1'"), HasSubstr("unit '2'"), HasSubstr("rank")));
  }
}

// PyTorch issue 38174, pytorch/torchtitan PR 1617, Lightning-AI/pytorch-lightning issue 20404
TEST(UnevenInputs, AValidationWithFewerBatchesOnOneRankEnds) {
  constexpr int kRanks = 2;
  ebb::test::spawn_ranks(kRanks, [](const auto& group) {
    auto chain = make_chain(3);
    auto plain = make_chain(3);
    auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1)});
    const at::NoGradGuard no_grad;
    const int num_batches = group->rank() == 0 ? 5 : 4;
    Join join(group);
    at::Tensor input;
    int step = 0;
    int seen = 0;
    for (; join.step(step < num_batches); ++step) {
      if (join.active()) {
        input = batch(group->rank(), step);
        ++seen;
      }
      EXPECT_TRUE(at::equal(chain->forward(input), plain->forward(input)));
    }
    EXPECT_EQ(step, 5);
    EXPECT_EQ(seen, num_batches);
  });
}

} // namespace
} // namespace ebb::shard
