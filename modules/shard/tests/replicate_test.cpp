#include "support.h"

#include <map>
#include <optional>

namespace ebb::shard {
namespace {

using test::error_of;
using test::make_chain;
using ::testing::HasSubstr;

// Several buckets for a chain of a few Linear(8, 8).
ReplicateOptions replicated_over(const std::shared_ptr<comm::Communicator>& group) {
  return {.mesh = comm::Mesh(group), .bucket_bytes = 600, .first_bucket_bytes = 300};
}

at::Tensor input(int rank, int step = 0) {
  return at::full({2, 8}, 0.5 + rank + 0.1 * step);
}

// The averaged gradients of `loss_of` on every rank, computed by one process.
template <class Loss>
std::vector<at::Tensor> expected_gradients(int ranks, int layers, Loss loss_of) {
  auto plain = make_chain(layers);
  for (int rank = 0; rank < ranks; ++rank) {
    (loss_of(plain, rank) / ranks).backward();
  }
  std::vector<at::Tensor> grads;
  for (const auto& parameter : plain->parameters()) {
    grads.push_back(parameter.grad());
  }
  return grads;
}

void expect_gradients(const torch::nn::Sequential& chain, const std::vector<at::Tensor>& expected) {
  const auto parameters = chain->parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    ASSERT_EQ(parameters[i].grad().defined(), expected[i].defined()) << i;
    EXPECT_TRUE(!expected[i].defined() || at::allclose(parameters[i].grad(), expected[i], 1e-6, 1e-7)) << i;
  }
}

TEST(Replicate, AParameterUsedOnOneRankGetsItsShareAndOneUsedNowhereGetsNone) {
  const auto loss_of = [](torch::nn::Sequential& layers, int rank) {
    auto x = layers->at<torch::nn::LinearImpl>(0).forward(input(rank));
    if (rank == 1) {
      x = layers->at<torch::nn::LinearImpl>(1).forward(x);
    }
    return x.pow(2).mean(); // the third layer: never
  };
  const auto expected = expected_gradients(2, 3, loss_of);
  ebb::test::spawn_ranks(2, [&](const auto& group) {
    auto chain = make_chain(3);
    auto model = replicate(chain, replicated_over(group));
    for (int step = 0; step < 3; ++step) {
      loss_of(chain, group->rank()).backward();
      expect_gradients(chain, expected);
      model.zero_grad();
    }
  });
}

TEST(Replicate, NoSyncAddsUpLocallyAndTheNextBackwardReducesAll) {
  const auto loss_of = [](torch::nn::Sequential& layers, int rank) {
    return layers->forward(input(rank, 0)).pow(2).mean() + layers->forward(input(rank, 1)).pow(2).mean();
  };
  const auto expected = expected_gradients(2, 3, loss_of);
  ebb::test::spawn_ranks(2, [&](const auto& group) {
    auto chain = make_chain(3);
    auto model = replicate(chain, replicated_over(group));
    for (int repeat = 0; repeat < 2; ++repeat) {
      const auto before = group->traffic().calls_of(comm::Op::kAllReduce);
      {
        const auto scope = model.no_sync();
        chain->forward(input(group->rank(), 0)).pow(2).mean().backward();
      }
      EXPECT_EQ(group->traffic().calls_of(comm::Op::kAllReduce), before);
      chain->forward(input(group->rank(), 1)).pow(2).mean().backward();
      expect_gradients(chain, expected);
      model.zero_grad();
    }
  });
}

TEST(Replicate, AFailedBackwardLeavesNothingBehind) {
  const auto loss_of = [](torch::nn::Sequential& layers, int rank) {
    return layers->forward(input(rank)).pow(2).mean();
  };
  const auto expected = expected_gradients(2, 4, loss_of);
  for (const bool reset_by_hand : {false, true}) {
    ebb::test::spawn_ranks(2, [&](const auto& group) {
      auto chain = make_chain(4);
      auto model = replicate(chain, replicated_over(group));
      for (int round = 0; round < 3; ++round) {
        auto x = chain->at<torch::nn::LinearImpl>(0).forward(input(group->rank()));
        x.register_hook([](at::Tensor grad) -> at::Tensor { // after the last layers have started their reductions
          TORCH_CHECK(false, "thrown in backward");
          return grad;
        });
        for (int i = 1; i < 4; ++i) {
          x = chain->at<torch::nn::LinearImpl>(i).forward(x);
        }
        EXPECT_THAT(error_of([&] { (100 * x.pow(2).mean()).backward(); }), HasSubstr("thrown in backward"));
        if (reset_by_hand) {
          model.reset();
        }
        loss_of(chain, group->rank()).backward();
        expect_gradients(chain, expected);
        model.zero_grad();
      }
    });
  }
}

TEST(Replicate, WithoutItsResultABackwardThrows) {
  auto chain = make_chain(2);
  (void)replicate(chain, replicated_over(comm::single()));
  EXPECT_THAT(error_of([&] { chain->forward(input(0)).sum().backward(); }), HasSubstr("the ReplicatedModel is gone"));
  const auto again = replicate(chain, replicated_over(comm::single()));
  EXPECT_EQ(error_of([&] { chain->forward(input(0)).sum().backward(); }), "");
}

TEST(Replicate, UnfreezingLaterIsNamed) {
  auto chain = make_chain(2);
  chain->parameters()[1].set_requires_grad(false);
  const auto model = replicate(chain, replicated_over(comm::single()));
  chain->forward(input(0)).sum().backward();
  EXPECT_FALSE(chain->parameters()[1].grad().defined());
  chain->parameters()[1].set_requires_grad(true);
  EXPECT_THAT(
      error_of([&] { chain->forward(input(0)).sum().backward(); }),
      ::testing::AllOf(HasSubstr("'0.bias' was frozen"), HasSubstr("before replicate()")));
}

TEST(Replicate, ErrorsCarryItsName) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    auto chain = make_chain(group->rank() == 0 ? 2 : 3);
    EXPECT_THAT(
        error_of([&] { (void)replicate(chain, replicated_over(group)); }),
        HasSubstr("[replicate] the ranks' models differ"));
  });
}

} // namespace
} // namespace ebb::shard
