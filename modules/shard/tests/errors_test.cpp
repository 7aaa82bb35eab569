#include "support.h"

#include "ebb/base/error.h"
#include "ebb/base/log.h"

#include <sstream>
#include <thread>
#include <vector>

namespace ebb::shard {
namespace {

using test::error_of;
using test::make_chain;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

ShardOptions one_rank() {
  return {.mesh = comm::Mesh(comm::single()), .wrap = wrap_by_size(1)};
}

TEST(Errors, AnOptimizerOnTheModelsParametersStopsAtItsFirstStep) {
  for (const bool adam : {false, true}) {
    auto chain = make_chain(2);
    auto model = fully_shard(chain, one_rank());
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    if (adam) {
      optimizer = std::make_unique<torch::optim::AdamW>(chain->parameters(), torch::optim::AdamWOptions(0.1));
    } else {
      optimizer = std::make_unique<torch::optim::SGD>(chain->parameters(), torch::optim::SGDOptions(0.1));
    }
    chain->forward(at::ones({2, 8})).sum().backward();
    EXPECT_THAT(
        error_of([&] { optimizer->step(); }),
        AllOf(HasSubstr("'0.weight' (unit '0')"), HasSubstr("ShardedModel's parameters()")));
  }
}

TEST(Errors, AnOptimizerBuiltBeforeShardingStopsAtItsFirstStep) {
  auto chain = make_chain(2);
  torch::optim::SGD optimizer(chain->parameters(), 0.1);
  auto model = fully_shard(chain, one_rank());
  chain->forward(at::ones({2, 8})).sum().backward();
  EXPECT_THAT(error_of([&] { optimizer.step(); }), HasSubstr("ShardedModel's parameters()"));
}

TEST(Errors, TheGradientOnTheModelsParameterSaysWhereItIs) {
  auto chain = make_chain(2);
  auto model = fully_shard(chain, one_rank());
  chain->forward(at::ones({2, 8})).sum().backward();
  const auto text =
      AllOf(HasSubstr("'0.weight'"), HasSubstr("parameters() of the ShardedModel"), HasSubstr("clip_grad_norm_()"));
  EXPECT_THAT(error_of([&] { chain->parameters()[0].grad().sum().item<float>(); }), text);
  EXPECT_THAT(error_of([&] { torch::nn::utils::clip_grad_norm_(chain->parameters(), 1.0); }), text);
  EXPECT_EQ(error_of([&] { chain->zero_grad(); }), "");
}

TEST(Errors, BackwardAfterASentinelWasLeftInPlaceGoesOn) {
  auto chain = make_chain(2);
  auto model = fully_shard(chain, one_rank());
  for (int i = 0; i < 3; ++i) {
    chain->forward(at::ones({2, 8})).sum().backward();
  }
  auto plain = make_chain(2);
  for (int i = 0; i < 3; ++i) {
    plain->forward(at::ones({2, 8})).sum().backward();
  }
  EXPECT_TRUE(at::allclose(model.named_parameters()[0].second.grad(), plain->parameters()[0].grad().flatten()));
}

TEST(Errors, WritesToShardedParametersNameParameterAndUnit) {
  auto chain = make_chain(3);
  auto model = fully_shard(chain, one_rank());
  auto& layer = chain->at<torch::nn::LinearImpl>(1);
  const at::NoGradGuard no_grad;
  const auto names_weight = AllOf(HasSubstr("'1.weight' (unit '1')"), HasSubstr("full_parameters()"));
  EXPECT_THAT(error_of([&] { layer.weight.zero_(); }), names_weight);
  EXPECT_THAT(error_of([&] { layer.weight.t().mul_(2); }), names_weight);
  EXPECT_THAT(error_of([&] { layer.weight.select(0, 3).fill_(1); }), names_weight);
  EXPECT_THAT(error_of([&] { at::add_out(layer.weight, at::ones({8, 8}), at::ones({8, 8})); }), names_weight);
  EXPECT_THAT(error_of([&] { torch::nn::init::uniform_(layer.weight); }), names_weight);
  EXPECT_THAT(error_of([&] { layer.bias.data().add_(1); }), HasSubstr("'1.bias' (unit '1')"));
  EXPECT_THAT(error_of([&] { at::_foreach_add_({layer.bias}, 1); }), HasSubstr("'1.bias' (unit '1')"));
}

TEST(Errors, RawPointersToShardedParametersNameTheUnit) {
  auto chain = make_chain(2);
  auto model = fully_shard(chain, one_rank());
  auto& layer = chain->at<torch::nn::LinearImpl>(1);
  const auto raw = AllOf(HasSubstr("unit '1'"), HasSubstr("'1.weight'"), HasSubstr("full_parameters()"));
  EXPECT_THAT(error_of([&] { layer.weight.data_ptr<float>(); }), raw);
  EXPECT_THAT(error_of([&] { layer.weight.const_data_ptr<float>(); }), raw);
  EXPECT_THAT(error_of([&] { layer.weight.accessor<float, 2>()[0][0]; }), raw);
  std::stringstream stream;
  EXPECT_THAT(error_of([&] { torch::save(chain, stream); }), HasSubstr("full_parameters()"));
}

TEST(Errors, ReadsThroughOperatorsWorkWithoutAScope) {
  auto chain = make_chain(2);
  const auto expected = chain->at<torch::nn::LinearImpl>(1).weight.detach().clone();
  auto model = fully_shard(chain, one_rank());
  auto& weight = chain->at<torch::nn::LinearImpl>(1).weight;
  EXPECT_TRUE(at::equal(weight.detach().clone(), expected));
  EXPECT_EQ(weight[2][3].item<float>(), expected[2][3].item<float>());
  EXPECT_EQ(weight.norm().item<float>(), expected.norm().item<float>());
}

TEST(Errors, ConversionAfterShardingIsRefused) {
  auto chain = make_chain(2);
  auto model = fully_shard(chain, one_rank());
  const auto refused = AllOf(HasSubstr("'0.weight' (unit '0')"), HasSubstr("before fully_shard()"));
  EXPECT_THAT(error_of([&] { chain->to(at::kDouble); }), refused);
  EXPECT_THAT(error_of([&] { chain->to(at::kHalf); }), refused);
  EXPECT_NE(error_of([&] { chain->to(at::kMeta); }), "");
  EXPECT_THAT(error_of([&] { chain->parameters()[0].set_data(at::zeros({8, 8})); }), refused);
  EXPECT_EQ(error_of([&] { chain->to(at::kFloat); }), "");
  EXPECT_EQ(error_of([&] { chain->to(at::kCPU); }), "");
}

TEST(Errors, AliasesMadeBeforeShardingAreRefused) {
  auto chain = make_chain(2);
  const auto cached = chain->at<torch::nn::LinearImpl>(1).weight.t();
  EXPECT_THAT(
      error_of([&] { (void)fully_shard(chain, one_rank()); }), AllOf(HasSubstr("'1.weight'"), HasSubstr("alias")));
}

TEST(Errors, ALiveGraphIsAnAlias) {
  auto chain = make_chain(2);
  const auto loss = chain->forward(at::ones({2, 8})).sum();
  EXPECT_THAT(error_of([&] { (void)fully_shard(chain, one_rank()); }), HasSubstr("alias"));
}

TEST(Errors, DifferentTensorsOnTheSameMemoryCannotBeShardedApart) {
  auto chain = make_chain(2);
  auto& first = chain->at<torch::nn::LinearImpl>(0);
  auto& second = chain->at<torch::nn::LinearImpl>(1);
  second.weight.set_data(first.weight.detach());
  EXPECT_THAT(
      error_of([&] { (void)fully_shard(chain, one_rank()); }),
      AllOf(HasSubstr("'0.weight'"), HasSubstr("'1.weight'"), HasSubstr("same memory")));
}

TEST(Errors, ShardingTwiceIsRefused) {
  auto chain = make_chain(2);
  auto model = fully_shard(chain, one_rank());
  EXPECT_THAT(error_of([&] { (void)fully_shard(chain, one_rank()); }), HasSubstr("sharded already"));
  EXPECT_THAT(error_of([&] { (void)replicate(chain, {.mesh = comm::Mesh(comm::single())}); }), HasSubstr("choose one"));
}

TEST(Errors, TheModelWithoutItsShardedModelSaysSo) {
  auto chain = make_chain(2);
  { auto model = fully_shard(chain, one_rank()); }
  EXPECT_THAT(error_of([&] { chain->forward(at::ones({2, 8})); }), HasSubstr("keep it alive"));
}

TEST(Errors, DifferentModelsOnDifferentRanksNameTheFirstParameterThatDiffers) {
  std::vector<std::string> errors(2);
  ebb::test::spawn_ranks(2, [&](const auto& group) {
    torch::nn::Sequential chain(torch::nn::Linear(4, 4), torch::nn::Linear(4, group->rank() == 0 ? 4 : 5));
    errors[group->rank()] = error_of([&] { (void)fully_shard(chain, {.mesh = comm::Mesh(group)}); });
    EXPECT_EQ(group->traffic().calls_of(comm::Op::kBroadcast), 0);
  });
  for (const auto& error : errors) {
    EXPECT_THAT(error, AllOf(HasSubstr("'1.weight'"), HasSubstr("[4, 4]"), HasSubstr("[5, 4]"), HasSubstr("rank 1")));
  }
}

TEST(Errors, DifferentOptionsOnDifferentRanksAreFound) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    auto chain = make_chain(2);
    const auto error =
        error_of([&] { (void)fully_shard(chain, {.mesh = comm::Mesh(group), .frames = 2 + group->rank()}); });
    EXPECT_THAT(error, HasSubstr("frames"));
  });
}

TEST(Errors, UnitsUsedInDifferentOrdersAreNamedByTheDebugCheck) {
  std::vector<std::string> errors(2);
  ebb::test::spawn_ranks(2, [&](const auto& group) {
    auto chain = make_chain(2);
    auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1), .check_order = true});
    const int first = group->rank();
    errors[group->rank()] = error_of([&] {
      auto x = chain->at<torch::nn::LinearImpl>(first).forward(at::ones({2, 8}));
      chain->at<torch::nn::LinearImpl>(1 - first).forward(x);
    });
  });
  for (const auto& error : errors) {
    EXPECT_THAT(error, AllOf(HasSubstr("unit '0'"), HasSubstr("unit '1'"), HasSubstr("different orders")));
  }
}

// test_fsdp_exec_order: after a first step in order, in training and in evaluation
TEST(Errors, TheDebugCheckAlsoCoversLaterStepsAndEvaluation) {
  for (const bool evaluates : {false, true}) {
    std::vector<std::string> errors(2);
    ebb::test::spawn_ranks(2, [&](const auto& group) {
      auto chain = make_chain(4);
      auto model = fully_shard(
          chain, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1), .frames = 1, .prefetch = 0, .check_order = true});
      const auto run = [&](const std::vector<int>& order) {
        auto x = at::ones({2, 8});
        for (const int i : order) {
          x = chain->template at<torch::nn::LinearImpl>(i).forward(x);
        }
        return x.sum();
      };
      for (int step = 0; step < 2; ++step) {
        EXPECT_EQ(error_of([&] { run({0, 1, 2, 3}).backward(); }), "");
      }
      const at::AutoGradMode mode(!evaluates);
      EXPECT_EQ(error_of([&] { run({3, 2, 1, 0}); }), ""); // another order than before, but everywhere
      errors[group->rank()] = error_of([&] { run(group->rank() == 0 ? std::vector{1, 2, 0} : std::vector{1, 3, 0}); });
    });
    for (const auto& error : errors) {
      EXPECT_THAT(error, AllOf(HasSubstr("unit '2'"), HasSubstr("unit '3'"), HasSubstr("different orders")));
    }
  }
}

TEST(Errors, BadOptionsNameTheValue) {
  auto chain = make_chain(1);
  auto options = one_rank();
  options.frames = 0;
  EXPECT_THAT(error_of([&] { (void)fully_shard(chain, options); }), HasSubstr("at least 1 frame, got 0"));
  torch::nn::Sequential empty(torch::nn::ReLU{});
  EXPECT_THAT(error_of([&] { (void)fully_shard(empty, one_rank()); }), HasSubstr("got none"));
  auto model = fully_shard(chain, one_rank());
  EXPECT_THAT(error_of([&] { model.clip_grad_norm_(1.0, 3.0); }), HasSubstr("got 3"));
  EXPECT_THAT(error_of([&] { model.clip_grad_norm_(-1.0); }), HasSubstr("got -1"));
}

TEST(Errors, AnExceptionInAStepLeavesAModelThatWorks) {
  for (const bool in_backward : {false, true}) {
    auto chain = make_chain(4);
    auto plain = make_chain(4);
    auto model = fully_shard(chain, one_rank());
    EXPECT_NE(
        error_of([&] {
          auto x = at::ones({2, 8}).set_requires_grad(true);
          for (int i = 0; i < 4; ++i) {
            x = chain->at<torch::nn::LinearImpl>(i).forward(x);
            if (i == 1) {
              TORCH_CHECK(in_backward, "thrown in forward");
              x.register_hook([](at::Tensor grad) -> at::Tensor {
                TORCH_CHECK(false, "thrown in backward");
                return grad;
              });
            }
          }
          x.sum().backward();
        }),
        "");
    chain->forward(at::ones({2, 8})).sum().backward();
    plain->forward(at::ones({2, 8})).sum().backward();
    const auto leaves = model.named_parameters();
    const auto expected = plain->named_parameters();
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      EXPECT_TRUE(at::equal(leaves[i].second.grad(), expected[leaves[i].first].grad().flatten())) << leaves[i].first;
    }
    EXPECT_EQ(model.residency().held_bytes, 0);
  }
}

TEST(Errors, UnfreezingAfterShardingIsNamed) {
  auto chain = make_chain(2);
  chain->parameters()[1].set_requires_grad(false);
  auto model = fully_shard(chain, one_rank());
  chain->forward(at::ones({2, 8})).sum().backward();
  chain->parameters()[1].set_requires_grad(true);
  EXPECT_THAT(
      error_of([&] {
        chain->forward(at::ones({2, 8}));
      }),
      AllOf(HasSubstr("'0.bias' (unit '0') was frozen"), HasSubstr("before fully_shard()")));
}

TEST(Errors, EqualUnitsUsedInAnotherOrderAreFoundByTheirNames) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    auto chain = make_chain(2);
    auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1)});
    const auto first = group->rank() == 0 ? 0 : 1;
    EXPECT_THAT(
        error_of([&] {
          chain->at<torch::nn::LinearImpl>(first).forward(at::ones({2, 8}));
        }),
        AllOf(HasSubstr("all_gather of unit '0'"), HasSubstr("all_gather of unit '1'")));
  });
}

TEST(Errors, DifferentUnitsOnDifferentRanksAreFoundAtTheStart) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    auto chain = make_chain(2);
    const auto wrap = group->rank() == 0 ? wrap_root() : wrap_by_size(1);
    EXPECT_THAT(
        error_of([&] { (void)fully_shard(chain, {.mesh = comm::Mesh(group), .wrap = wrap}); }),
        AllOf(HasSubstr("[fully_shard] the ranks' models differ"), HasSubstr("units:")));
  });
}

TEST(Errors, UseOnASecondThreadDuringABackwardIsRefused) {
  auto chain = make_chain(3);
  auto plain = make_chain(3);
  auto model = fully_shard(chain, one_rank());
  const auto x = at::ones({2, 8});
  auto second_loss = chain->forward(x).sum();
  std::vector<std::string> refusals;
  auto middle = chain->at<torch::nn::LinearImpl>(0).forward(x);
  middle.register_hook([&](const at::Tensor& grad) { // the backward has used units 2 and 1 by now
    std::thread([&] {
      refusals.push_back(error_of([&] { second_loss.backward(); }));
      refusals.push_back(error_of([&] { chain->forward(x); }));
    }).join();
    return grad;
  });
  chain->at<torch::nn::LinearImpl>(2).forward(chain->at<torch::nn::LinearImpl>(1).forward(middle)).sum().backward();
  EXPECT_THAT(refusals, testing::Each(AllOf(HasSubstr("second thread"), HasSubstr("take turns"))));
  EXPECT_EQ(refusals.size(), 2U);
  plain->forward(x).sum().backward();
  EXPECT_TRUE(at::equal(model.parameters()[0].grad(), plain->parameters()[0].grad().flatten()));
}

TEST(Errors, AnOperatorOverAllUnitsIsWarnedOfOnce) {
  static std::vector<std::string> lines;
  log::set_sink([](log::Level, int, std::string_view text) { lines.emplace_back(text); });
  auto chain = make_chain(6);
  auto model = fully_shard(chain, one_rank());
  for (int i = 0; i < 2; ++i) {
    at::_foreach_norm(chain->parameters());
  }
  log::set_sink(nullptr);
  EXPECT_THAT(lines, testing::ElementsAre(AllOf(HasSubstr("aten::_foreach_norm"), HasSubstr("6 units at once"))));

  lines.clear();
  log::set_sink([](log::Level, int, std::string_view text) { lines.emplace_back(text); });
  auto whole_chain = make_chain(6);
  auto options = one_rank();
  options.strategy = Strategy::kNoShard; // in memory anyway
  auto whole = fully_shard(whole_chain, options);
  at::_foreach_norm(whole_chain->parameters());
  log::set_sink(nullptr);
  EXPECT_THAT(lines, testing::IsEmpty());
}

TEST(Errors, ResetAfterAFailedForwardLeavesNothingUnsharded) {
  auto chain = make_chain(3);
  auto model = fully_shard(chain, one_rank());
  chain->forward(at::ones({2, 8}));
  EXPECT_GT(model.residency().held_bytes, 0);
  model.reset();
  EXPECT_EQ(model.residency().held_bytes, 0);
}

} // namespace
} // namespace ebb::shard
