#include "engine.h"
#include "reported_support.h"

#include <algorithm>

namespace ebb::shard {
namespace {

using test::backward_of_all_ranks;
using test::batch;
using test::error_of;
using test::expect_gradients;
using test::make_chain;
using ::testing::HasSubstr;

// PyTorch issue 104504: SHARD_GRAD_OP with mixed precision, a forward in training, in evaluation, and in training again.
TEST(StepPhases, AnyOrderOfTrainingEvaluationAndScopesGivesTheSameValues) {
  for (const auto strategy : test::kStrategies) {
    for (const std::string dtype : {"fp32", "bf16"}) {
      test::at_world_sizes([&](const auto& group) {
        auto chain = make_chain(4);
        auto options = test::over(group, strategy);
        options.mixed_precision = mixed_precision(dtype);
        auto model = fully_shard(chain, options);
        const auto x = batch(group->rank());
        const auto first = chain->forward(x);
        first.pow(2).mean().backward();
        const auto output = first.detach().clone();
        std::vector<at::Tensor> gradients;
        for (const auto& leaf : model.parameters()) {
          gradients.push_back(leaf.grad().clone());
        }
        model.zero_grad();
        const auto masters = make_chain(4);

        std::array phases{0, 1, 2, 3};
        do {
          for (int repeat = 0; repeat < 2; ++repeat) {
            for (const int phase : phases) {
              const auto where = ::testing::PrintToString(phases) + " at " + std::to_string(phase);
              if (phase == 0) {
                ASSERT_TRUE(at::equal(chain->forward(x), output)) << where;
              } else if (phase == 1) {
                const auto y = chain->forward(x);
                ASSERT_TRUE(at::equal(y, output)) << where;
                y.pow(2).mean().backward();
                for (std::size_t i = 0; i < gradients.size(); ++i) {
                  ASSERT_TRUE(at::equal(model.parameters()[i].grad(), gradients[i])) << where << ", gradient " << i;
                }
                ASSERT_TRUE(strategy == Strategy::kNoShard || model.residency().held_bytes == 0) << where;
                model.zero_grad();
              } else if (phase == 2) {
                const at::NoGradGuard no_grad;
                chain->eval();
                ASSERT_TRUE(at::equal(chain->forward(x), output)) << where;
                chain->train();
              } else {
                auto scope = model.full_parameters({.writeback = repeat == 0});
                ASSERT_TRUE(at::equal(chain->parameters()[2], masters->parameters()[2])) << where;
                scope.close();
                ASSERT_TRUE(strategy == Strategy::kNoShard || model.residency().held_bytes == 0) << where;
              }
            }
          }
        } while (std::next_permutation(phases.begin(), phases.end()));
      });
    }
  }
}

// PyTorch issue 131965
TEST(StepPhases, AnEvaluationEndsWithinItsFramesAndReshardEmptiesThem) {
  for (const auto strategy : {Strategy::kFullShard, Strategy::kShardGradOp}) {
    test::at_world_sizes([&](const auto& group) {
      auto chain = make_chain(6);
      auto model = fully_shard(chain, test::over(group, strategy));
      const at::NoGradGuard no_grad;
      for (int i = 0; i < 2; ++i) {
        chain->forward(batch(group->rank()));
        const auto residency = model.residency();
        EXPECT_GT(residency.held_bytes, 0);
        EXPECT_LE(residency.held_bytes, residency.frame_bytes);
        EXPECT_EQ(residency.kept_bytes, 0);
        model.reshard(model.units());
        EXPECT_EQ(model.residency().held_bytes, 0);
      }
    });
  }
}

// facebookresearch/fairscale issues 490, 1129; PyTorch PR 86343
TEST(StepPhases, AChildMayBeUsedBeforeTheRoot) {
  for (const auto strategy : test::kStrategies) {
    for (const bool child_backward : {false, true}) {
      test::at_world_sizes([&](const auto& group) {
        auto chain = make_chain(4);
        auto plain = make_chain(4);
        auto options = test::over(group, strategy);
        options.wrap = wrap_by_name({"1", "2"}); // 0 and 3 are the root's own
        auto model = fully_shard(chain, options);
        const auto use_child = [&](torch::nn::Sequential net, int rank) {
          return test::layer(net, 2).forward(batch(rank)).pow(2).mean();
        };
        const auto early = use_child(chain, group->rank());
        if (child_backward) {
          early.backward();
          backward_of_all_ranks(*plain, group->size(), [&](int rank) { return use_child(plain, rank); });
          expect_gradients(model, *plain);
          model.zero_grad();
          plain->zero_grad();
        }
        for (int step = 0; step < 2; ++step) {
          chain->forward(batch(group->rank())).pow(2).mean().backward();
          backward_of_all_ranks(
              *plain, group->size(), [&](int rank) { return plain->forward(batch(rank)).pow(2).mean(); });
          expect_gradients(model, *plain);
          model.zero_grad();
          plain->zero_grad();
        }
      });
    }
  }
}

// mosaicml/composer PR 3030, PR 3866; pytorch/torchtitan issue 1329
TEST(StepPhases, ABatchThatFailsOnAllRanksIsSkippedAndLeavesNothingUnsharded) {
  for (const auto strategy : test::kStrategies) {
    for (const bool in_backward : {false, true}) {
      for (const bool reset_by_hand : {false, true}) {
        test::at_world_sizes([&](const auto& group) {
          auto chain = make_chain(4);
          auto plain = make_chain(4);
          auto model = fully_shard(chain, test::over(group, strategy));
          const auto fail = [&] {
            auto x = batch(group->rank());
            for (int i = 0; i < 4; ++i) {
              x = test::layer(chain, i).forward(x);
              if (i == 2) {
                TORCH_CHECK(in_backward, "out of memory in layer 2");
                x.register_hook([](const at::Tensor& grad) {
                  TORCH_CHECK(!grad.defined(), "out of memory in layer 2");
                  return grad;
                });
              }
            }
            (100 * x.pow(2).mean()).backward();
          };
          torch::optim::SGD optimizer(model.parameters(), 0.1);
          torch::optim::SGD reference(plain->parameters(), 0.1);
          for (int step = 0; step < 3; ++step) {
            EXPECT_THAT(error_of(fail), HasSubstr("out of memory in layer 2"));
            if (reset_by_hand) {
              model.reset();
              EXPECT_TRUE(strategy == Strategy::kNoShard || model.residency().held_bytes == 0);
            }
            const auto loss = chain->forward(batch(group->rank(), step)).pow(2).mean();
            EXPECT_TRUE(at::equal(loss, plain->forward(batch(group->rank(), step)).pow(2).mean()));
            loss.backward();
            backward_of_all_ranks(
                *plain, group->size(), [&](int rank) { return plain->forward(batch(rank, step)).pow(2).mean(); });
            expect_gradients(model, *plain);
            EXPECT_TRUE(strategy == Strategy::kNoShard || model.residency().held_bytes == 0);
            optimizer.step();
            optimizer.zero_grad();
            reference.step();
            reference.zero_grad();
          }
        });
      }
    }
  }
}

std::int64_t count(const std::vector<std::string>& events, const std::string& event) {
  return std::count(events.begin(), events.end(), event);
}

// FSDP2's set_reshard_after_forward
TEST(Schedule, ReshardAfterForwardMayChangeBetweenSteps) {
  test::at_world_sizes([](const auto& group) {
    auto chain = make_chain(5);
    auto plain = make_chain(5);
    auto options = test::over(group);
    options.frames = 1;
    options.prefetch = 0;
    auto model = fully_shard(chain, options);
    backward_of_all_ranks(*plain, group->size(), [&](int rank) { return plain->forward(batch(rank)).sum(); });
    for (const bool reshard : {true, false, false, true}) {
      model.set_reshard_after_forward({"1", "2"}, reshard);
      model.engine().record_events(true);
      const auto loss = chain->forward(batch(group->rank()).set_requires_grad(true)).sum();
      EXPECT_EQ(model.residency().kept_bytes > 0, !reshard);
      loss.backward();
      const auto events = model.engine().take_events();
      EXPECT_EQ(count(events, "unshard 1"), reshard ? 2 : 1);
      EXPECT_EQ(count(events, "unshard 2"), reshard ? 2 : 1);
      EXPECT_EQ(count(events, "unshard 3"), 2);
      EXPECT_EQ(model.residency().held_bytes, 0);
      expect_gradients(model, *plain);
      model.zero_grad();
    }
    EXPECT_THAT(error_of([&] { model.set_reshard_after_forward({"nine"}, true); }), HasSubstr("got 'nine'"));
  });
}

// FSDP2's set_modules_to_backward_prefetch
TEST(Schedule, BackwardGathersAheadWhatItsListSays) {
  test::at_world_sizes([](const auto& group) {
    auto chain = make_chain(6);
    auto plain = make_chain(6);
    auto options = test::over(group);
    options.frames = 2;
    options.prefetch = 1;
    auto model = fully_shard(chain, options);
    const auto in_backward = [&](const std::vector<std::string>& make_room = {}) {
      const auto loss = chain->forward(batch(group->rank())).sum();
      model.reshard(make_room);
      model.engine().record_events(true);
      loss.backward();
      std::vector<std::string> gathers;
      for (const auto& event : model.engine().take_events()) {
        if (event.rfind("unshard", 0) == 0 || event.rfind("prefetch", 0) == 0) {
          gathers.push_back(event);
        }
      }
      return gathers;
    };
    backward_of_all_ranks(*plain, group->size(), [&](int rank) { return plain->forward(batch(rank)).sum(); });
    in_backward();
    model.zero_grad();
    const auto predicted = in_backward();
    expect_gradients(model, *plain);
    model.zero_grad();
    model.set_backward_prefetch("5", {"1", "2"}); // the last unit of forward is the first of backward
    const auto first = in_backward({"3", "4"}); // or all frames are full of what comes sooner
    EXPECT_EQ(first.front(), "prefetch 1") << ::testing::PrintToString(first);
    expect_gradients(model, *plain);
    model.zero_grad();
    model.set_backward_prefetch("5", {});
    model.set_backward_prefetch("4", {"1"});
    const auto listed = in_backward();
    EXPECT_EQ(listed.front(), "prefetch 1") << ::testing::PrintToString(listed);
    expect_gradients(model, *plain);
    model.zero_grad();
    model.set_backward_prefetch("4", {});
    EXPECT_EQ(in_backward(), predicted);
    EXPECT_THAT(error_of([&] { model.set_backward_prefetch("0", {"nine"}); }), HasSubstr("got 'nine'"));
  });
}

} // namespace
} // namespace ebb::shard
