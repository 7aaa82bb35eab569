#include "support.h"

#include "engine.h"

namespace ebb::shard {
namespace {

using test::make_chain;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// One SGD step after another on a chain of five, with whatever the options are; then the parameters.
std::vector<at::Tensor> train(
    const std::shared_ptr<comm::Communicator>& group, const ShardOptions& options, int steps = 3,
    const std::function<void(ShardedModel&)>& before_backward = {}) {
  auto chain = make_chain(5);
  auto model = fully_shard(chain, options);
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < steps; ++step) {
    const auto loss = chain->forward(at::full({2, 8}, 1.0 + group->rank() + step)).pow(2).mean();
    if (before_backward) {
      before_backward(model);
    }
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  auto scope = model.full_parameters({.writeback = false});
  std::vector<at::Tensor> values;
  for (const auto& parameter : chain->parameters()) {
    values.push_back(parameter.detach().clone());
  }
  return values;
}

void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(at::equal(a[i], b[i])) << i;
  }
}

TEST(UnitOptions, StrategiesMixedUnitByUnitGiveTheSameValues) {
  for (const int ranks : {1, 2, 4}) {
    ebb::test::spawn_ranks(ranks, [](const auto& group) {
      const auto plain = train(group, test::over(group));
      auto mixed = test::over(group);
      mixed.unit_options = [](const ModuleInfo& info) -> UnitOptions {
        return info.name == "1"   ? UnitOptions{.shard = false}
               : info.name == "3" ? UnitOptions{.reshard_after_forward = false}
                                  : UnitOptions{};
      };
      expect_equal(train(group, mixed), plain);
    });
  }
}

TEST(UnitOptions, AUnitThatIsKeptAfterForwardIsGatheredOnce) {
  test::at_world_sizes([](const auto& group) {
    auto chain = make_chain(5);
    auto options = test::over(group);
    options.frames = 1;
    options.prefetch = 0;
    options.unit_options = [](const ModuleInfo& info) {
      return info.name == "0" || info.name == "2" ? UnitOptions{.reshard_after_forward = false} : UnitOptions{};
    };
    auto model = fully_shard(chain, options);
    model.engine().record_events(true);
    chain->forward(at::ones({2, 8}).set_requires_grad(true)).sum().backward();
    const auto events = model.engine().take_events();
    EXPECT_EQ(std::count(events.begin(), events.end(), "unshard 2"), 1);
    EXPECT_EQ(std::count(events.begin(), events.end(), "unshard 1"), 2);
  });
}

TEST(ReshardAfterForward, AnIntegerGathersBackwardWithinNeighbours) {
  ebb::test::spawn_ranks(4, [](const auto& group) {
    const auto plain = train(group, test::over(group));
    auto options = test::over(group);
    options.frames = 1;
    options.prefetch = 0;
    options.unit_options = [](const ModuleInfo&) { return UnitOptions{.reshard_after_forward = 2}; };
    expect_equal(train(group, options), plain);

    auto chain = make_chain(3);
    auto model = fully_shard(chain, options);
    const auto near = options.mesh.shard_neighbours(2);
    const auto far_before = group->traffic().calls_of(comm::Op::kAllGather);
    const auto near_before = near->traffic().calls_of(comm::Op::kAllGather);
    const auto loss = chain->forward(at::ones({2, 8}).set_requires_grad(true)).sum();
    EXPECT_GT(model.residency().near_bytes, 0);
    loss.backward();
    EXPECT_EQ(group->traffic().calls_of(comm::Op::kAllGather) - far_before, 3); // forward
    EXPECT_EQ(near->traffic().calls_of(comm::Op::kAllGather) - near_before, 2); // backward; the last never left
    EXPECT_EQ(model.residency().near_bytes, 0);
  });
}

TEST(ReshardAfterForward, WhatAnIntegerKeepsIsNotUsedAfterAWrite) {
  ebb::test::spawn_ranks(4, [](const auto& group) {
    auto chain = make_chain(3);
    auto options = test::over(group);
    options.frames = 1;
    options.prefetch = 0;
    options.unit_options = [](const ModuleInfo&) { return UnitOptions{.reshard_after_forward = 2}; };
    auto model = fully_shard(chain, options);
    chain->forward(at::ones({2, 8}).set_requires_grad(true)); // no backward follows
    {
      const auto scope = model.full_parameters();
      const at::NoGradGuard no_grad;
      for (auto& parameter : chain->parameters()) {
        parameter.fill_(1);
      }
    }
    // Each Linear(8, 8) of ones makes 8 x + 1 of x in every place: 9, 73, 585.
    EXPECT_TRUE(at::equal(chain->forward(at::ones({2, 8})), at::full({2, 8}, 585.0)));
  });
}

TEST(ReshardAfterForward, AnIntegerMustDivideTheRanks) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    auto chain = make_chain(2);
    auto options = test::over(group);
    options.unit_options = [](const ModuleInfo&) { return UnitOptions{.reshard_after_forward = 3}; };
    EXPECT_THAT(
        test::error_of([&] { (void)fully_shard(chain, options); }),
        HasSubstr("divide the 2 ranks of the shard axis, got 3"));
  });
}

TEST(Unshard, GathersAheadAndHoldsUntilReshard) {
  test::at_world_sizes([](const auto& group) {
    auto chain = make_chain(4);
    auto model = fully_shard(chain, test::over(group));
    EXPECT_THAT(model.units(), ElementsAre("0", "1", "2", "3"));
    auto handle = model.unshard({"3"});
    const auto gathers = model.stats().unshards;
    EXPECT_EQ(gathers, 1);
    handle.wait();
    EXPECT_GT(model.residency().kept_bytes, 0);
    chain->at<torch::nn::LinearImpl>(3).forward(at::ones({1, 8}));
    EXPECT_EQ(model.stats().unshards, gathers);
    model.reshard({"3"});
    EXPECT_EQ(model.residency().held_bytes, 0);
    EXPECT_THAT(
        test::error_of([&] { model.unshard({"7"}); }), ::testing::AllOf(HasSubstr("got '7'"), HasSubstr("'0', '1'")));
  });
}

TEST(Unshard, ChangesNoValue) {
  test::at_world_sizes([](const auto& group) {
    const auto plain = train(group, test::over(group));
    expect_equal(train(group, test::over(group), 3, [](ShardedModel& model) { model.unshard({"1", "2"}); }), plain);
    expect_equal(
        train(
            group, test::over(group), 3,
            [](ShardedModel& model) {
              model.reshard({"0", "1", "2", "3", "4"});
            }),
        plain);
    expect_equal(
        train(group, test::over(group), 3, [](ShardedModel& model) { model.set_reshard_after_backward({"1"}, false); }),
        plain);
  });
}

TEST(ReshardAfterBackward, OffKeepsTheUnitUntilItsShardIsWritten) {
  test::at_world_sizes([](const auto& group) {
    auto chain = make_chain(4);
    auto model = fully_shard(chain, test::over(group));
    model.set_reshard_after_backward({"2"}, false);
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    chain->forward(at::ones({2, 8})).sum().backward();
    EXPECT_GT(model.residency().held_bytes, 0);
    optimizer.step();
    EXPECT_EQ(model.residency().held_bytes, 0);
  });
}

TEST(Prefetch, FollowsAnExplicitList) {
  test::at_world_sizes([](const auto& group) {
    auto chain = make_chain(5);
    auto options = test::over(group);
    options.frames = 3;
    options.prefetch = 1;
    auto model = fully_shard(chain, options);
    model.set_forward_prefetch("0", {"2", "1"});
    model.set_backward_prefetch("4", {"2"});
    model.engine().record_events(true);
    chain->forward(at::ones({2, 8})).sum().backward();
    const auto events = model.engine().take_events();
    EXPECT_EQ(events[0], "unshard 0");
    EXPECT_EQ(events[1], "prefetch 2");
    EXPECT_EQ(events[2], "prefetch 1");
    EXPECT_THAT(test::error_of([&] { model.set_forward_prefetch("0", {"nine"}); }), HasSubstr("got 'nine'"));
  });
}

// test_fully_shard_training, explicit prefetch: two units ahead, in both directions
TEST(Prefetch, TwoAheadFollowTheListsInBothDirections) {
  constexpr int kUnits = 6;
  for (const int ranks : {1, 2, 4}) {
    ebb::test::spawn_ranks(ranks, [](const auto& group) {
      const auto plain = train(group, test::over(group));
      auto options = test::over(group);
      options.frames = 1;
      options.prefetch = 2;
      auto chain = make_chain(kUnits);
      auto model = fully_shard(chain, options);
      const auto listed = [](int unit, int direction) {
        std::vector<std::string> next;
        for (const int other : {unit + direction, unit + 2 * direction}) {
          if (other >= 0 && other < kUnits) {
            next.push_back(std::to_string(other));
          }
        }
        return next;
      };
      for (int unit = 0; unit < kUnits; ++unit) {
        model.set_forward_prefetch(std::to_string(unit), listed(unit, 1));
        model.set_backward_prefetch(std::to_string(unit), listed(unit, -1));
      }
      for (int step = 0; step < 2; ++step) {
        model.engine().record_events(true);
        chain->forward(at::ones({2, 8}).set_requires_grad(true)).sum().backward();
        std::vector<std::string> gathers;
        for (const auto& event : model.engine().take_events()) {
          if (event.starts_with("unshard") || event.starts_with("prefetch")) {
            gathers.push_back(event);
          }
        }
        EXPECT_THAT(
            gathers,
            ElementsAre(
                "unshard 0", "prefetch 1", "prefetch 2", "prefetch 3", "prefetch 4", "prefetch 5", // 3, 4, 5 stay
                "prefetch 2", "prefetch 1", "prefetch 0"));
        EXPECT_LE(model.residency().peak_held_bytes, model.residency().frame_bytes);
      }
      options.frames = 3; // of the lists nothing but the order of gathers changes
      auto with_lists = options;
      expect_equal(
          train(
              group, with_lists, 3,
              [](ShardedModel& each) {
                each.set_forward_prefetch("0", {"1", "2"});
                each.set_backward_prefetch("4", {"3", "2"});
              }),
          plain);
    });
  }
}

} // namespace
} // namespace ebb::shard
