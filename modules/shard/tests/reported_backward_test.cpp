#include "ebb/shard/checkpoint.h"

#include "engine.h"
#include "reported_support.h"
#include "support/forwarding_communicator.h"

#include <chrono>
#include <limits>
#include <thread>

namespace ebb::shard {
namespace {

using test::backward_of_all_ranks;
using test::batch;
using test::error_of;
using test::expect_gradients;
using test::make_chain;
using ::testing::AllOf;
using ::testing::HasSubstr;

at::Tensor loss_of(torch::nn::Sequential chain, int rank, int step = 0) {
  return chain->forward(batch(rank, step)).pow(2).mean();
}

// PyTorch issues 106637, 47260, PR 120926
TEST(SeveralBackwards, TwoThroughOneGraphAddUp) {
  for (const auto strategy : test::kStrategies) {
    test::at_world_sizes([&](const auto& group) {
      auto chain = make_chain(4);
      auto plain = make_chain(4);
      auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .strategy = strategy, .wrap = wrap_by_size(1)});
      for (int step = 0; step < 2; ++step) {
        const auto loss = loss_of(chain, group->rank(), step);
        loss.backward({}, /*retain_graph=*/true);
        loss.backward();
        backward_of_all_ranks(*plain, group->size(), [&](int rank) { return 2 * loss_of(plain, rank, step); });
        expect_gradients(model, *plain, 1e-6);
        if (strategy != Strategy::kNoShard) {
          EXPECT_EQ(model.residency().held_bytes, 0);
        }
        model.zero_grad();
        plain->zero_grad();
      }
    });
  }
}

// PyTorch issue 106637
TEST(SeveralBackwards, TwoLossesOnOneTrunkAddUp) {
  for (const auto strategy : test::kStrategies) {
    test::at_world_sizes([&](const auto& group) {
      auto chain = make_chain(3);
      auto plain = make_chain(3);
      auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .strategy = strategy, .wrap = wrap_by_size(1)});
      const auto losses_of = [](torch::nn::Sequential net, int rank) {
        const auto trunk = at::tanh(test::layer(net, 0).forward(batch(rank)));
        return std::pair(
            test::layer(net, 1).forward(trunk).pow(2).mean(), test::layer(net, 2).forward(trunk).abs().mean());
      };
      const auto [first, second] = losses_of(chain, group->rank());
      first.backward({}, /*retain_graph=*/true);
      second.backward();
      backward_of_all_ranks(*plain, group->size(), [&](int rank) {
        const auto [a, b] = losses_of(plain, rank);
        return a + b;
      });
      expect_gradients(model, *plain, 1e-6);
    });
  }
}

// PyTorch issue 47260
TEST(SeveralBackwards, CreateGraphIsRefusedAndTheNextStepWorks) {
  for (const bool replicated : {false, true}) {
    test::at_world_sizes([&](const auto& group) {
      auto chain = make_chain(3);
      auto plain = make_chain(3);
      std::optional<ShardedModel> model;
      std::optional<ReplicatedModel> replica;
      if (replicated) {
        replica = replicate(chain, {.mesh = comm::Mesh(group)});
      } else {
        model = fully_shard(chain, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1)});
      }
      EXPECT_THAT(
          error_of([&] { loss_of(chain, group->rank()).backward({}, true, /*create_graph=*/true); }),
          AllOf(HasSubstr("create_graph"), HasSubstr("autograd::grad()")));
      loss_of(chain, group->rank()).backward();
      backward_of_all_ranks(*plain, group->size(), [&](int rank) { return loss_of(plain, rank); });
      if (model) {
        expect_gradients(*model, *plain);
        EXPECT_EQ(model->residency().held_bytes, 0);
      } else {
        for (std::size_t i = 0; i < plain->parameters().size(); ++i) {
          EXPECT_TRUE(at::equal(chain->parameters()[i].grad(), plain->parameters()[i].grad())) << i;
        }
      }
    });
  }
}

// PyTorch issue 47260: the penalty on an input's gradient needs a graph of that gradient, and none of parameters'.
TEST(SeveralBackwards, APenaltyOnTheInputsGradientTrainsAsUnsharded) {
  for (const auto strategy : test::kStrategies) {
    test::at_world_sizes([&](const auto& group) {
      auto chain = make_chain(3);
      auto plain = make_chain(3);
      auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .strategy = strategy, .wrap = wrap_by_size(1)});
      const auto penalty_of = [](torch::nn::Sequential net, int rank) {
        auto x = batch(rank).set_requires_grad(true);
        auto y = x;
        for (int i = 0; i < 3; ++i) {
          y = at::tanh(test::layer(net, i).forward(y));
        }
        const auto gradient = torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true);
        return y.pow(2).mean() + (gradient[0].norm() - 1).pow(2);
      };
      for (int step = 0; step < 2; ++step) {
        penalty_of(chain, group->rank()).backward();
        backward_of_all_ranks(*plain, group->size(), [&](int rank) { return penalty_of(plain, rank); });
        expect_gradients(model, *plain, 1e-6);
        model.zero_grad();
        plain->zero_grad();
      }
    });
  }
}

/// Starts an operation only when its result is asked for, and then after a while; until then the output is NaN. What is
/// read before its time, or written to while it is still to be sent, gives wrong values.
class LateCommunicator final : public ebb::test::ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;

  std::unique_ptr<comm::Work> all_gather(
      const at::Tensor& output, const at::Tensor& input, std::string_view unit) override {
    return later(output, [=, this, unit = std::string(unit)] { return group().all_gather(output, input, unit); });
  }
  std::unique_ptr<comm::Work> reduce_scatter(
      const at::Tensor& output, const at::Tensor& input, double divisor, std::string_view unit) override {
    return later(
        output, [=, this, unit = std::string(unit)] { return group().reduce_scatter(output, input, divisor, unit); });
  }
  std::unique_ptr<comm::Work> all_reduce(
      const at::Tensor& tensor, comm::ReduceOp op, double divisor, std::string_view unit) override {
    return later({}, [=, this, unit = std::string(unit)] { return group().all_reduce(tensor, op, divisor, unit); });
  }

 private:
  using Start = std::function<std::unique_ptr<comm::Work>()>;

  struct LateWork final : comm::Work {
    explicit LateWork(Start start) : start(std::move(start)) {}
    bool poll() override {
      return work && work->poll();
    }
    void wait() override {
      if (!work) {
        std::this_thread::sleep_for(std::chrono::microseconds(300));
        work = start();
      }
      work->wait();
    }
    void release() override {
      wait();
      work->release();
    }
    Start start;
    std::unique_ptr<comm::Work> work;
  };

  static std::unique_ptr<comm::Work> later(const at::Tensor& output, Start start) {
    if (output.defined()) {
      const at::NoGradGuard no_grad;
      at::Tensor(output).fill_(std::numeric_limits<double>::quiet_NaN());
    }
    return std::make_unique<LateWork>(std::move(start));
  }
};

// facebookresearch/fairscale issues 777, 617, PR 476
TEST(SeveralForwards, ACheckpointedUnitAppliedTwiceIsReducedAfterItsLastUse) {
  constexpr std::int64_t kWide = 96;
  const auto run = [](torch::nn::Sequential net, const at::Tensor& input, bool recompute) {
    auto x = input;
    for (const int i : {0, 1, 1, 2, 0}) {
      const auto layer = [net, i](const at::Tensor& in) { return at::gelu(test::layer(net, i).forward(in)); };
      x = recompute ? checkpoint(layer, x) : layer(x);
    }
    return x.pow(2).mean();
  };
  for (const auto strategy : test::kStrategies) {
    test::at_world_sizes([&](const auto& group) {
      auto chain = make_chain(3, kWide);
      auto plain = make_chain(3, kWide);
      const auto late = std::make_shared<LateCommunicator>(group);
      auto model = fully_shard(chain, {.mesh = comm::Mesh(late), .strategy = strategy, .wrap = wrap_by_size(1)});
      torch::optim::SGD optimizer(model.parameters(), 0.1);
      torch::optim::SGD reference(plain->parameters(), 0.1);
      for (int step = 0; step < 3; ++step) {
        const auto reduced = model.stats().reduces;
        run(chain, batch(group->rank(), step, kWide), true).backward();
        EXPECT_EQ(model.stats().reduces - reduced, 3);
        backward_of_all_ranks(
            *plain, group->size(), [&](int rank) { return run(plain, batch(rank, step, kWide), false); });
        expect_gradients(model, *plain, 1e-5);
        optimizer.step();
        optimizer.zero_grad();
        reference.step();
        reference.zero_grad();
      }
      test::expect_parameters(model, *chain, *plain, 1e-5);
    });
  }
}

// facebookresearch/fairscale issue 617
TEST(SeveralForwards, TwoBeforeOneBackwardAddUpAndReduceOnce) {
  test::at_world_sizes([](const auto& group) {
    auto chain = make_chain(4);
    auto plain = make_chain(4);
    auto model =
        fully_shard(chain, {.mesh = comm::Mesh(std::make_shared<LateCommunicator>(group)), .wrap = wrap_by_size(1)});
    const auto first = loss_of(chain, group->rank(), 0);
    const auto second = loss_of(chain, group->rank(), 1);
    (first + second).backward();
    EXPECT_EQ(model.stats().reduces, 4);
    backward_of_all_ranks(
        *plain, group->size(), [&](int rank) { return loss_of(plain, rank, 0) + loss_of(plain, rank, 1); });
    expect_gradients(model, *plain, 1e-6);
  });
}

} // namespace
} // namespace ebb::shard
