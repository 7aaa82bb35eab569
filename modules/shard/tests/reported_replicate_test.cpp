#include "ebb/shard/join.h"

#include "reported_support.h"

#include <set>

namespace ebb::shard {
namespace {

using test::backward_of_all_ranks;
using test::batch;
using test::built;
using test::expect_values;
using test::make_chain;
using ::testing::HasSubstr;

// Several buckets for a chain of a few Linear(8, 8) of 288 bytes each.
ReplicateOptions replicated_over(const test::Group& group) {
  return {.mesh = comm::Mesh(group), .bucket_bytes = 600, .first_bucket_bytes = 300};
}

// Gradients of two models with whole parameters.
void expect_same_gradients(const torch::nn::Module& net, const torch::nn::Module& plain, double tolerance = 0) {
  const auto parameters = net.named_parameters();
  for (const auto& expected : plain.named_parameters()) {
    const auto& grad = parameters[expected.key()].grad();
    ASSERT_EQ(grad.defined(), expected.value().grad().defined()) << expected.key();
    if (grad.defined()) {
      EXPECT_TRUE(
          tolerance == 0 ? at::equal(grad, expected.value().grad())
                         : at::allclose(grad, expected.value().grad(), tolerance, tolerance))
          << expected.key();
    }
  }
}

/// A body and two heads.
struct TwoHeads : torch::nn::Module {
  TwoHeads()
      : body(register_module("body", torch::nn::Linear(8, 8))),
        first(register_module("first", torch::nn::Linear(8, 3))),
        second(register_module("second", torch::nn::Linear(8, 5))) {}
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    const auto hidden = at::tanh(body(x));
    return {first(hidden), second(hidden)};
  }
  torch::nn::Linear body, first, second;
};

// PyTorch issues 79171, 97030
TEST(Replicas, AHeadThatIsNotInTheLossKeepsNoGradientInAnyStep) {
  test::at_world_sizes([](const auto& group) {
    const auto make = [] { return std::make_shared<TwoHeads>(); };
    auto net = built(make);
    auto plain = built(make);
    auto model = replicate(*net, replicated_over(group));
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    torch::optim::SGD reference(plain->parameters(), 0.1);
    for (int step = 0; step < 6; ++step) {
      net->forward(batch(group->rank(), step)).first.pow(2).mean().backward();
      backward_of_all_ranks(
          *plain, group->size(), [&](int rank) { return plain->forward(batch(rank, step)).first.pow(2).mean(); });
      EXPECT_FALSE(net->second->weight.grad().defined());
      expect_same_gradients(*net, *plain);
      optimizer.step();
      optimizer.zero_grad();
      reference.step();
      reference.zero_grad();
    }
    expect_values(*net, *plain);
  });
}

// PyTorch issue 128949
TEST(Replicas, AnUnusedLayerDoesNotLetRanksDriftApart) {
  std::mutex mutex;
  std::vector<at::Tensor> values(2);
  ebb::test::spawn_ranks(2, [&](const auto& group) {
    auto chain = make_chain(4);
    auto plain = make_chain(4);
    auto model = replicate(chain, replicated_over(group));
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    torch::optim::SGD reference(plain->parameters(), 0.1);
    const auto loss_of = [](torch::nn::Sequential net, int rank, int step) {
      auto x = batch(rank, step);
      for (const int i : {0, 1, 3}) {
        x = at::tanh(test::layer(net, i).forward(x));
      }
      return x.pow(2).mean();
    };
    for (int step = 0; step < 3; ++step) {
      loss_of(chain, group->rank(), step).backward();
      backward_of_all_ranks(*plain, 2, [&](int rank) { return loss_of(plain, rank, step); });
      expect_same_gradients(*chain, *plain);
      optimizer.step();
      optimizer.zero_grad();
      reference.step();
      reference.zero_grad();
    }
    expect_values(*chain, *plain);
    const std::lock_guard lock(mutex);
    for (const auto& parameter : chain->parameters()) {
      auto& mine = values[group->rank()];
      mine = mine.defined() ? at::cat({mine, parameter.detach().flatten()}) : parameter.detach().flatten();
    }
  });
  EXPECT_TRUE(at::equal(values[0], values[1]));
}

// PyTorch PR 187732
TEST(Replicas, EveryWindowOfAccumulationIsReduced) {
  test::at_world_sizes([](const auto& group) {
    auto chain = make_chain(3);
    auto plain = make_chain(3);
    auto model = replicate(chain, replicated_over(group));
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    torch::optim::SGD reference(plain->parameters(), 0.1);
    const auto loss_of = [](torch::nn::Sequential& net, int rank, int step) {
      return net->forward(batch(rank, step)).pow(2).mean();
    };
    std::int64_t reductions = -1;
    for (int window = 0; window < 3; ++window) {
      const auto before = group->traffic().calls_of(comm::Op::kAllReduce);
      {
        const auto scope = model.no_sync();
        loss_of(chain, group->rank(), 2 * window).backward();
      }
      EXPECT_EQ(group->traffic().calls_of(comm::Op::kAllReduce), before);
      loss_of(chain, group->rank(), 2 * window + 1).backward();
      const auto now = group->traffic().calls_of(comm::Op::kAllReduce) - before;
      EXPECT_EQ(now, reductions == -1 ? now : reductions) << "window " << window;
      reductions = now;
      backward_of_all_ranks(*plain, group->size(), [&](int rank) {
        return loss_of(plain, rank, 2 * window) + loss_of(plain, rank, 2 * window + 1);
      });
      expect_same_gradients(*chain, *plain, 1e-6);
      optimizer.step();
      optimizer.zero_grad();
      reference.step();
      reference.zero_grad();
    }
    EXPECT_GT(reductions, 1);
    expect_values(*chain, *plain, 1e-6);
  });
}

// PyTorch issue 38174
TEST(Replicas, RanksWithFewerBatchesJoinUntilTheLastOneEnds) {
  constexpr int kRanks = 3;
  ebb::test::spawn_ranks(kRanks, [](const auto& group) {
    auto chain = make_chain(3);
    auto plain = make_chain(3);
    auto model = replicate(chain, replicated_over(group));
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    torch::optim::SGD reference(plain->parameters(), 0.1);
    const auto num_batches = [](int rank) { return 4 - rank; };
    Join join(group);
    at::Tensor input;
    int step = 0;
    for (; join.step(step < num_batches(group->rank())); ++step) {
      if (join.active()) {
        input = batch(group->rank(), step);
      }
      join.weighted(chain->forward(input).pow(2).mean()).backward();
      for (int rank = 0; rank < kRanks; ++rank) {
        if (step < num_batches(rank)) {
          (plain->forward(batch(rank, step)).pow(2).mean() / kRanks).backward();
        }
      }
      expect_same_gradients(*chain, *plain, 1e-6);
      optimizer.step();
      optimizer.zero_grad();
      reference.step();
      reference.zero_grad();
    }
    EXPECT_EQ(step, 4);
    expect_values(*chain, *plain, 1e-6);
  });
}

// Ranks that were seeded differently train on, parameters and buffers, what rank 0 built; or each on its own.
TEST(Replicas, StartFromTheParametersAndBuffersOfRank0) {
  for (const bool sync : {true, false}) {
    std::mutex mutex;
    std::vector<at::Tensor> values(3);
    ebb::test::spawn_ranks(3, [&](const auto& group) {
      auto net = built(
          [] {
            torch::nn::BatchNorm1d norm(3);
            norm->running_mean.copy_(at::randn({3}));
            return torch::nn::Sequential(torch::nn::Linear(3, 3), norm);
          },
          20 + group->rank());
      const auto all = [&] {
        return at::cat(
            {net->parameters()[0].detach().flatten(), net->parameters()[1].detach(), net->buffers()[0].clone()});
      };
      const auto before = all();
      const auto model = replicate(net, {.mesh = comm::Mesh(group), .sync_module_states = sync});
      EXPECT_EQ(at::equal(before, all()), !sync || group->rank() == 0);
      const std::lock_guard lock(mutex);
      values[group->rank()] = all();
    });
    EXPECT_EQ(at::equal(values[0], values[1]), sync);
    EXPECT_EQ(at::equal(values[0], values[2]), sync);
  }
}

// PyTorch's gradient_as_bucket_view: no second copy of the gradients.
TEST(Replicas, GradientsAreViewsOfTheBucketsThatAreReduced) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    auto chain = make_chain(5);
    auto model = replicate(chain, replicated_over(group));
    // From the last layer: its bias and weight fill the first bucket of 300 bytes; then two of 600 take two layers each.
    constexpr std::size_t kBuckets = 3;
    EXPECT_THAT(model.explain(), HasSubstr("in 3 bucket(s)"));
    std::vector<const void*> first;
    for (int step = 0; step < 3; ++step) {
      const auto sent = test::bytes_sent(*group, comm::Op::kAllReduce);
      chain->forward(batch(group->rank(), step)).pow(2).mean().backward();
      EXPECT_GT(test::bytes_sent(*group, comm::Op::kAllReduce), sent);
      std::set<const c10::StorageImpl*> buckets;
      std::int64_t bytes = 0;
      std::vector<const void*> places;
      for (const auto& parameter : chain->parameters()) {
        const auto& grad = parameter.grad();
        places.push_back(grad.data_ptr());
        if (buckets.insert(grad.storage().unsafeGetStorageImpl()).second) {
          bytes += static_cast<std::int64_t>(grad.storage().nbytes());
        }
      }
      EXPECT_EQ(buckets.size(), kBuckets);
      EXPECT_LE(bytes, 5 * (64 + 16) * 4); // weight and bias, each from a multiple of 16 elements
      EXPECT_TRUE(first.empty() || first == places) << "step " << step;
      first = places;
      model.zero_grad(/*set_to_none=*/step % 2 == 0);
    }
  });
}

} // namespace
} // namespace ebb::shard
