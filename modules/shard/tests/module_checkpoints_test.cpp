#include "ebb/shard/module_checkpoints.h"

#include "support.h"

#include <mutex>

namespace ebb::shard {
namespace {

using test::error_of;
using test::make_chain;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct CountedBlockImpl : torch::nn::Module {
  CountedBlockImpl() : linear(register_module("linear", torch::nn::Linear(8, 8))) {}
  at::Tensor forward(const at::Tensor& x) {
    ++runs;
    return at::gelu(linear->forward(x));
  }
  torch::nn::Linear linear;
  int runs = 0;
};
TORCH_MODULE(CountedBlock);

// A model as a user writes it: its forward asks the object that says which blocks are checkpointed.
struct CountedStackImpl : torch::nn::Module {
  CountedStackImpl() {
    for (int i = 0; i < 4; ++i) {
      blocks->push_back(CountedBlock());
    }
    register_module("blocks", blocks);
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : *blocks) {
      x = checkpoints(std::dynamic_pointer_cast<CountedBlockImpl>(block), x);
    }
    return x;
  }
  std::vector<int> runs() const {
    std::vector<int> counts;
    for (const auto& block : *blocks) {
      counts.push_back(block->as<CountedBlockImpl>()->runs);
    }
    return counts;
  }
  torch::nn::ModuleList blocks;
  ModuleCheckpoints checkpoints;
};
TORCH_MODULE(CountedStack);

CountedStack make_stack() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(4);
  return CountedStack();
}

TEST(ModuleCheckpoints, RecomputeTheModulesThatThePolicyChoosesAndNoOthers) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    const auto train = [&](const WrapPolicy& policy) {
      auto stack = make_stack();
      auto model = fully_shard(*stack, {.mesh = comm::Mesh(group), .wrap = wrap_by_class({"CountedBlock"})});
      if (policy) {
        stack->checkpoints = ModuleCheckpoints(*stack, policy);
      }
      stack->forward(at::full({2, 8}, 0.1 + group->rank())).pow(2).sum().backward();
      std::vector<at::Tensor> grads;
      for (const auto& leaf : model.parameters()) {
        grads.push_back(leaf.grad().clone());
      }
      return std::make_pair(stack->runs(), grads);
    };
    const auto [none, plain] = train({});
    EXPECT_THAT(none, ElementsAre(1, 1, 1, 1));
    const auto [all, recomputed] = train(wrap_by_class({"CountedBlock"}));
    EXPECT_THAT(all, ElementsAre(2, 2, 2, 2));
    const auto [some, mixed] = train(wrap_by_name({"blocks.1", "blocks.3"}));
    EXPECT_THAT(some, ElementsAre(1, 2, 1, 2));
    for (std::size_t i = 0; i < plain.size(); ++i) {
      EXPECT_TRUE(at::allclose(plain[i], recomputed[i], 1e-6, 1e-7)) << i;
      EXPECT_TRUE(at::allclose(plain[i], mixed[i], 1e-6, 1e-7)) << i;
    }
  });
}

TEST(ModuleCheckpoints, ShowThePolicyEachModuleWithItsSizeChildrenFirst) {
  auto stack = make_stack();
  std::vector<std::string> seen;
  const ModuleCheckpoints checkpoints(*stack, [&](const ModuleInfo& info) {
    seen.push_back(info.name + " " + std::to_string(info.numel) + " " + std::to_string(info.unwrapped_numel));
    return info.name == "blocks.0" || info.name == "blocks";
  });
  ASSERT_EQ(seen.size(), 10U);
  EXPECT_EQ(seen[1], "blocks.0 72 72");
  EXPECT_EQ(seen[8], "blocks 288 216");
  EXPECT_EQ(seen[9], " 288 0");
  EXPECT_THAT(checkpoints.names(), ElementsAre("blocks.0", "blocks"));
  EXPECT_TRUE(checkpoints.contains(*stack->blocks->ptr(0)));
  EXPECT_FALSE(checkpoints.contains(*stack->blocks->ptr(1)));
}

TEST(ModuleCheckpoints, RefusePoliciesThatChooseNothing) {
  auto stack = make_stack();
  EXPECT_THAT(
      error_of([&] { ModuleCheckpoints(*stack, wrap_by_class({"Attention"})); }), HasSubstr("chooses none of 10"));
  EXPECT_THAT(error_of([&] { ModuleCheckpoints(*stack, {}); }), HasSubstr("got an empty one"));
}

TEST(ModuleCheckpoints, OffTheModulesAreCalledAsTheyAre) {
  auto stack = make_stack();
  stack->checkpoints = ModuleCheckpoints(*stack, wrap_by_class({"CountedBlock"}), {.enabled = false});
  stack->forward(at::ones({1, 8})).sum().backward();
  EXPECT_THAT(stack->runs(), ElementsAre(1, 1, 1, 1));
}

TEST(CheckpointSequential, RecomputesInSegmentsAndGivesTheSameGradients) {
  for (const std::int64_t segments : {1, 2, 5}) {
    torch::nn::Sequential sequential;
    std::vector<CountedBlock> blocks;
    torch::manual_seed(4);
    for (int i = 0; i < 5; ++i) {
      blocks.emplace_back();
      sequential->push_back(blocks.back());
    }
    const auto x = at::linspace(-1, 1, 16).view({2, 8}).set_requires_grad(true);
    const auto direct = torch::autograd::grad({sequential->forward(x).sum()}, {x})[0];
    const auto recomputed = torch::autograd::grad({checkpoint_sequential(sequential, segments, x).sum()}, {x})[0];
    EXPECT_TRUE(at::equal(direct, recomputed)) << segments;
    for (const auto& block : blocks) {
      EXPECT_EQ(block->runs, 3) << segments;
    }
  }
}

TEST(CheckpointSequential, RefusesMoreSegmentsThanModules) {
  EXPECT_THAT(
      error_of([] {
        checkpoint_sequential(make_chain(2), 3, at::ones({1, 8}));
      }),
      HasSubstr("expected 1 to 2 segments, as many as the Sequential has modules, got 3"));
  EXPECT_THAT(error_of([] { checkpoint_sequential(make_chain(2), 0, at::ones({1, 8})); }), HasSubstr("got 0"));
}

} // namespace
} // namespace ebb::shard
