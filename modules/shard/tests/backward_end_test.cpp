#include "support.h"
#include "support/forwarding_communicator.h"

#include "engine.h"

#include <future>
#include <optional>

namespace ebb::shard {
namespace {

using test::error_of;
using test::make_chain;
using ::testing::HasSubstr;

constexpr int kMicros = 3;

bool any_gradient(const ShardedModel& model) {
  const auto leaves = model.parameters();
  return std::any_of(leaves.begin(), leaves.end(), [](const auto& leaf) { return leaf.grad().defined(); });
}

// Three micro-batches, every one reduced; `before` is told whether it is the last. Then the gradients.
std::vector<at::Tensor> accumulate(
    const std::shared_ptr<comm::Communicator>& group, const ShardOptions& options,
    const std::function<void(ShardedModel&, bool last)>& before = {},
    const std::function<void(ShardedModel&, bool last)>& after = {}) {
  auto chain = make_chain(5);
  auto model = fully_shard(chain, options);
  for (int repeat = 0; repeat < 2; ++repeat) {
    model.zero_grad();
    for (int micro = 0; micro < kMicros; ++micro) {
      if (before) {
        before(model, micro + 1 == kMicros);
      }
      chain->forward(at::full({2, 8}, 0.3 + group->rank() + micro)).pow(2).mean().backward();
      if (after) {
        after(model, micro + 1 == kMicros);
      }
    }
  }
  std::vector<at::Tensor> grads;
  for (const auto& leaf : model.parameters()) {
    grads.push_back(leaf.grad().clone());
  }
  return grads;
}

void expect_all_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(at::equal(a[i], b[i])) << i;
  }
}

class LastBackward : public ::testing::TestWithParam<std::tuple<Strategy, int>> {};

TEST_P(LastBackward, OnlyTheLastWaitsVotesAndShowsTheSum) {
  const auto& [strategy, ranks] = GetParam();
  ebb::test::spawn_ranks(ranks, [strategy = strategy](const auto& group) {
    const auto plain = accumulate(group, test::over(group, strategy));
    const auto votes = group->traffic().calls_of(comm::Op::kAllReduce);
    const auto grads = accumulate(
        group, test::over(group, strategy), [](ShardedModel& model, bool last) { model.set_is_last_backward(last); },
        [](ShardedModel& model, bool last) { EXPECT_EQ(any_gradient(model), last); });
    expect_all_equal(grads, plain);
    const auto reductions = strategy == Strategy::kNoShard ? 2 * kMicros * 5 : 0;
    if (group->size() > 1) {
      EXPECT_EQ(group->traffic().calls_of(comm::Op::kAllReduce) - votes, 2 + reductions);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    All, LastBackward,
    ::testing::Combine(
        ::testing::Values(Strategy::kFullShard, Strategy::kShardGradOp, Strategy::kNoShard),
        ::testing::Values(1, 2, 4)),
    [](const auto& info) {
      return std::string(name_of(std::get<0>(info.param))) + "_" + std::to_string(std::get<1>(info.param)) + "ranks";
    });

TEST(LastBackwardOf, HybridShardingAndWhatZeroGradDrops) {
  ebb::test::spawn_ranks(4, [](const auto& world) {
    ShardOptions options{
        .mesh = comm::Mesh::replicate_by_shard(world, 2, 2),
        .strategy = Strategy::kHybridShard,
        .wrap = wrap_by_size(1)};
    const auto plain = accumulate(world, options);
    const auto is_last = [](ShardedModel& model, bool last) { model.set_is_last_backward(last); };
    expect_all_equal(accumulate(world, options, is_last), plain);

    auto chain = make_chain(3);
    auto model = fully_shard(chain, options);
    model.set_is_last_backward(false);
    chain->forward(at::ones({2, 8})).sum().backward();
    model.zero_grad(); // the reductions under way come to nothing
    model.set_is_last_backward(true);
    chain->forward(at::full({2, 8}, 0.5)).sum().backward();
    auto other = make_chain(3);
    auto fresh = fully_shard(other, options);
    other->forward(at::full({2, 8}, 0.5)).sum().backward();
    for (std::size_t i = 0; i < 6; ++i) {
      EXPECT_TRUE(at::equal(model.parameters()[i].grad(), fresh.parameters()[i].grad())) << i;
    }
  });
}

TEST(LastBackwardOf, OffloadedAndMixedModels) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    auto offloaded = test::over(group);
    offloaded.offload = OffloadPolicy{OffloadTier::kFile};
    auto mixed = test::over(group);
    mixed.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kBFloat16};
    auto whole_and_mixed = mixed;
    whole_and_mixed.strategy = Strategy::kNoShard;
    for (auto options : {offloaded, mixed, whole_and_mixed}) {
      const auto plain = accumulate(group, options);
      for (const bool many : {false, true}) {
        expect_all_equal(
            accumulate(
                group, options,
                [many](ShardedModel& model, bool last) {
                  model.set_reduce_scatter_max_input_buffers(many ? 4 : 1);
                  model.set_is_last_backward(last);
                }),
            plain);
      }
    }
  });
}

TEST(LastBackwardOf, SeveralForwardsFollowsTheirOrderInEachBackward) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    auto chain = make_chain(5);
    auto options = test::over(group);
    options.frames = 1;
    auto model = fully_shard(chain, options);
    const auto first = chain->forward(at::full({2, 8}, 0.2)).sum();
    const auto second = chain->forward(at::full({2, 8}, 0.7)).sum();
    model.engine().record_events(true);
    model.set_is_last_backward(false);
    second.backward();
    model.engine().take_events();
    model.engine().record_events(true);
    model.set_is_last_backward(true);
    first.backward();
    const auto events = model.engine().take_events();
    EXPECT_THAT(events, ::testing::Contains("prefetch 2"));
    auto plain = make_chain(5);
    plain->forward(at::full({2, 8}, 0.7)).sum().backward();
    plain->forward(at::full({2, 8}, 0.2)).sum().backward();
    const auto scope = model.full_parameters({.writeback = false, .with_grads = true});
    for (std::size_t i = 0; i < 10; ++i) {
      EXPECT_TRUE(at::allclose(chain->parameters()[i].grad(), plain->parameters()[i].grad(), 1e-6, 1e-7)) << i;
    }
  });
}

TEST(ManualFinalization, ABackwardInPartsReducesEachUnitOnce) {
  for (const int ranks : {1, 2, 4}) {
    ebb::test::spawn_ranks(ranks, [](const auto& group) {
      const auto in_parts = [&](bool manual, bool async) {
        auto chain = make_chain(4);
        auto model = fully_shard(chain, test::over(group));
        model.set_manual_backward_finalization(manual);
        const auto reduces = model.stats().reduces;
        const auto loss = chain->forward(at::full({2, 8}, 0.3 + group->rank())).pow(2).mean();
        const auto parameters = chain->parameters();
        for (const std::size_t first : {0, 1}) { // weights, then biases
          std::vector<at::Tensor> part;
          for (auto i = first; i < parameters.size(); i += 2) {
            part.push_back(parameters[i]);
          }
          loss.backward(at::Tensor(), /*retain_graph=*/first == 0, /*create_graph=*/false, part);
        }
        if (manual) {
          EXPECT_FALSE(any_gradient(model));
          auto handle = model.finalize_backward(async);
          EXPECT_EQ(any_gradient(model), !async);
          handle.wait();
        }
        EXPECT_EQ(model.stats().reduces - reduces, manual ? 4 : 8);
        std::vector<at::Tensor> grads;
        for (const auto& leaf : model.parameters()) {
          grads.push_back(leaf.grad().clone());
        }
        return grads;
      };
      const auto plain = in_parts(false, false);
      expect_all_equal(in_parts(true, false), plain);
      expect_all_equal(in_parts(true, true), plain);
    });
  }
}

TEST(ManualFinalization, SeveralBackwardsAddUp) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    const auto plain = accumulate(group, test::over(group));
    bool is_set = false;
    const auto grads = accumulate(
        group, test::over(group),
        [&](ShardedModel& model, bool) {
          if (!std::exchange(is_set, true)) {
            model.set_manual_backward_finalization(true);
          }
        },
        [](ShardedModel& model, bool last) {
          EXPECT_FALSE(any_gradient(model));
          if (last) {
            model.finalize_backward();
          }
        });
    for (std::size_t i = 0; i < plain.size(); ++i) { // later micro-batches were added up before they were reduced
      EXPECT_TRUE(at::allclose(grads[i], plain[i], 1e-6, 1e-7)) << i;
    }
  });
}

TEST(ManualFinalization, WrongCallsAreNamed) {
  auto chain = make_chain(2);
  auto model = fully_shard(chain, test::over(comm::single()));
  EXPECT_THAT(error_of([&] { model.finalize_backward(); }), HasSubstr("set_manual_backward_finalization(true)"));
  model.set_manual_backward_finalization(true);
  chain->forward(at::ones({2, 8})).sum().backward();
  EXPECT_THAT(
      error_of([&] { model.set_manual_backward_finalization(false); }), HasSubstr("call finalize_backward() first"));
  model.finalize_backward();
  model.set_manual_backward_finalization(false);
  EXPECT_THAT(error_of([&] { model.set_reduce_scatter_max_input_buffers(0); }), HasSubstr("at least 1"));
}

/// Counts reduce-scatters that nobody has waited for.
class CountsUnderWay final : public ebb::test::ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;
  std::unique_ptr<comm::Work> reduce_scatter(
      const at::Tensor& output, const at::Tensor& input, double divisor, std::string_view unit) override {
    most_ = std::max(most_, ++now_);
    return std::make_unique<Counted>(group().reduce_scatter(output, input, divisor, unit), now_);
  }
  int most() const {
    return most_;
  }

 private:
  struct Counted final : comm::Work {
    Counted(std::unique_ptr<comm::Work> work, int& now) : work(std::move(work)), now(&now) {}
    bool poll() override {
      return work->poll();
    }
    void wait() override {
      work->wait();
      *now -= !std::exchange(waited, true);
    }
    std::unique_ptr<comm::Work> work;
    int* now;
    bool waited = false;
  };
  int now_ = 0;
  int most_ = 0;
};

TEST(ReduceBuffers, SoManyReductionsAreUnderWayAndNoMore) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    std::vector<at::Tensor> plain;
    for (const int number : {1, 3}) {
      const auto counts = std::make_shared<CountsUnderWay>(group);
      const auto grads = accumulate(counts, test::over(counts), [&](ShardedModel& model, bool) {
        model.set_reduce_scatter_max_input_buffers(number);
        EXPECT_THAT(model.explain(), HasSubstr(number == 1 ? "reduce buffers 768 B" : "reduce buffers 1536 B"));
      });
      EXPECT_EQ(counts->most(), number);
      plain.empty() ? void(plain = grads) : expect_all_equal(grads, plain);
    }
  });
}

TEST(SeparateReduceGroup, ReducesInGroupsOfItsOwn) {
  for (const int ranks : {1, 2, 4}) {
    ebb::test::spawn_ranks(ranks, [](const auto& group) {
      for (const bool hybrid : {false, true}) {
        if (hybrid && group->size() != 4) {
          continue;
        }
        auto options = test::over(group);
        if (hybrid) {
          options.mesh = comm::Mesh::replicate_by_shard(group, 2, 2);
        }
        const auto plain = accumulate(group, options);
        const auto before = options.mesh.axis("shard")->traffic().calls_of(comm::Op::kReduceScatter);
        options.separate_reduce_group = true;
        std::int64_t elsewhere = 0;
        const auto grads = accumulate(group, options, {}, [&](ShardedModel& model, bool) {
          elsewhere = model.engine().reduce_group().traffic().calls_of(comm::Op::kReduceScatter);
        });
        expect_all_equal(grads, plain);
        EXPECT_EQ(options.mesh.axis("shard")->traffic().calls_of(comm::Op::kReduceScatter), before);
        EXPECT_GE(elsewhere, 2 * kMicros * 5);
      }
    });
  }
}

TEST(PostOptimEvent, TheNextGatherWaitsForAnOptimizerOnAnotherThread) {
  for (const int ranks : {1, 2, 4}) {
    ebb::test::spawn_ranks(ranks, [](const auto& group) {
      const auto train = [&](bool elsewhere) {
        auto chain = make_chain(3);
        auto model = fully_shard(chain, test::over(group));
        torch::optim::SGD optimizer(model.parameters(), 0.1);
        int waited = 0;
        for (int step = 0; step < 3; ++step) {
          chain->forward(at::full({2, 8}, 0.3 + group->rank() + step)).pow(2).mean().backward();
          if (!elsewhere) {
            optimizer.step();
            optimizer.zero_grad();
            continue;
          }
          std::future<void> stepped;
          std::promise<void> go;
          stepped = std::async(std::launch::async, [&optimizer, may = go.get_future()]() mutable {
            may.wait();
            optimizer.step();
            optimizer.zero_grad();
          });
          const auto gathers = model.stats().unshards;
          model.set_post_optim_event([&] {
            EXPECT_EQ(model.stats().unshards, gathers);
            ++waited;
            go.set_value();
            stepped.get();
          });
          chain->parameters()[0].sum(); // the event is gone with the first gather
          EXPECT_GT(model.stats().unshards, gathers);
        }
        EXPECT_EQ(waited, elsewhere ? 3 : 0);
        const auto scope = model.full_parameters({.writeback = false});
        std::vector<at::Tensor> values;
        for (const auto& parameter : chain->parameters()) {
          values.push_back(parameter.detach().clone());
        }
        return values;
      };
      expect_all_equal(train(true), train(false));
    });
  }
}

} // namespace
} // namespace ebb::shard
