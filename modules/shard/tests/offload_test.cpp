#include "ebb/shard/deferred_init.h"

#include "support.h"

#include "engine.h"
#include "support/temporary_folder.h"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <map>
#include <thread>

namespace ebb::shard {
namespace {

using test::error_of;
using test::make_chain;
using test::make_subject;
using test::shard_subject;
using test::wrap_everything;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kOffloadSteps = 4;

/// Copies that take their time, each another.
OffloadPolicy slow_file() {
  return {.tier = OffloadTier::kFile, .before_copy = [] {
            thread_local std::uint32_t state = 12345;
            state = state * 1664525 + 1013904223;
            std::this_thread::sleep_for(std::chrono::microseconds(state >> 21)); // up to 2 ms
          }};
}

/// What an option changes, and on how many ranks.
struct Variant {
  std::string name;
  int ranks = 2;
  std::function<void(ShardOptions&, const std::shared_ptr<comm::Communicator>&)> change = [](auto&, const auto&) {};
  bool accumulate = false;
};

std::vector<Variant> variants() {
  using Group = std::shared_ptr<comm::Communicator>;
  return {
      {"alone", 1},
      {"two", 2},
      {"three", 3},
      {"zero2", 2, [](ShardOptions& o, const Group&) { o.strategy = Strategy::kShardGradOp; }},
      {"no_shard", 2, [](ShardOptions& o, const Group&) { o.strategy = Strategy::kNoShard; }},
      {"hybrid", 4, [](ShardOptions& o, const Group& g) { o.mesh = comm::Mesh::replicate_by_shard(g, 2, 2); }},
      {"neighbours", 4,
       [](ShardOptions& o, const Group&) {
         o.unit_options = [](const ModuleInfo&) { return UnitOptions{.reshard_after_forward = 2}; };
       }},
      {"bf16", 2, [](ShardOptions& o, const Group&) { o.mixed_precision = mixed_precision("bf16"); }},
      {"kept_low", 2,
       [](ShardOptions& o, const Group&) {
         o.mixed_precision = {
             .param_dtype = at::kBFloat16, .reduce_dtype = at::kBFloat16, .keep_low_precision_grads = true};
       }},
      {"one_frame", 2, [](ShardOptions& o, const Group&) { o.frames = 1, o.prefetch = 0; }},
      {"far_ahead", 2, [](ShardOptions& o, const Group&) { o.prefetch = 3; }},
      {"hook", 2,
       [](ShardOptions& o, const Group&) {
         o.gradient_hook = [](const std::string&, at::Tensor& gradient) { gradient.mul_(0.5); };
       }},
      {"accumulated", 2, [](ShardOptions&, const Group&) {}, true},
  };
}

class Offloaded : public ::testing::TestWithParam<Variant> {};

TEST_P(Offloaded, TrainsBitEqualToTheSameModelInMemoryHoweverLateCopiesAre) {
  const auto& variant = GetParam();
  for (const std::string kind : {"gpt", "mlp"}) {
    ebb::test::spawn_ranks(variant.ranks, [&](const auto& group) {
      const auto train = [&](std::optional<OffloadPolicy> offload) {
        auto subject = make_subject(kind);
        ShardOptions options{.mesh = comm::Mesh(group), .wrap = wrap_everything()};
        variant.change(options, group);
        options.offload = std::move(offload);
        auto model = shard_subject(subject, options);
        torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(1e-2));
        std::vector<at::Tensor> results;
        for (int step = 0; step < kOffloadSteps; ++step) {
          if (variant.accumulate) {
            subject.loss(step + 100, group->rank()).backward();
            const auto scope = model.no_sync();
            subject.loss(step + 200, group->rank()).backward();
          }
          auto loss = subject.loss(step, group->rank());
          loss.backward();
          results.push_back(loss.detach().clone());
          for (const auto& leaf : model.parameters()) {
            results.push_back(leaf.grad().clone());
          }
          model.clip_grad_norm_(1.0);
          optimizer.step();
          optimizer.zero_grad();
        }
        for (const auto& leaf : model.parameters()) {
          results.push_back(leaf.detach().clone());
        }
        return results;
      };
      const auto expected = train(std::nullopt);
      const auto results = train(slow_file());
      ASSERT_EQ(results.size(), expected.size());
      for (std::size_t i = 0; i < results.size(); ++i) {
        ASSERT_TRUE(at::equal(results[i], expected[i])) << kind << ", tensor " << i << " of " << results.size();
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(All, Offloaded, ::testing::ValuesIn(variants()), [](const auto& info) {
  return info.param.name;
});

TEST(Offload, ShardsGradientsAndMomentsAreInTheTierAndCopiesAreGoneAfterAStep) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    auto chain = make_chain(4, 32);
    auto model = fully_shard(
        chain, {.mesh = comm::Mesh(group), .wrap = wrap_everything(), .offload = OffloadPolicy{OffloadTier::kFile}});
    const auto shards = model.shard_bytes();
    EXPECT_EQ(model.residency().offloaded_bytes, shards);
    torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(1e-2));
    std::int64_t leaves = 0;
    for (const auto& leaf : model.parameters()) {
      leaves += static_cast<std::int64_t>(leaf.nbytes());
    }
    for (int step = 0; step < 3; ++step) {
      chain->forward(at::ones({2, 32})).sum().backward();
      EXPECT_EQ(model.residency().staged_bytes, 0);
      optimizer.step();
      optimizer.zero_grad();
      EXPECT_EQ(model.residency().offloaded_bytes, 2 * shards + 2 * leaves) << "shards, gradients and two moments";
    }
  });
}

TEST(Offload, ShardsAreFetchedOneUnitBeyondThoseGatheredAhead) {
  auto chain = make_chain(6);
  auto model = fully_shard(
      chain, {.mesh = comm::Mesh(comm::single()),
              .wrap = wrap_everything(),
              .offload = OffloadPolicy{OffloadTier::kFile},
              .prefetch = 1});
  chain->forward(at::ones({2, 8})).sum().backward();
  model.engine().record_events(true);
  chain->forward(at::ones({2, 8}));
  const auto events = model.engine().take_events();
  const auto at = [&](const std::string& event) { return std::find(events.begin(), events.end(), event); };
  for (int unit = 3; unit < 6; ++unit) { // the first ones may still be in their frames
    const auto name = std::to_string(unit);
    ASSERT_NE(at("prefetch " + name), events.end()) << ::testing::PrintToString(events);
    EXPECT_LT(at("fetch " + name), at("prefetch " + name)) << ::testing::PrintToString(events);
  }
}

TEST(Offload, WritesInAScopeGoToTheTier) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    auto chain = make_chain(3);
    auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .wrap = wrap_everything(), .offload = slow_file()});
    (void)chain->forward(at::ones({2, 8}));
    {
      auto scope = model.full_parameters();
      const at::NoGradGuard no_grad;
      for (auto& parameter : chain->parameters()) {
        parameter.fill_(0.125);
      }
      scope.close();
    }
    // Each layer: the mean of eight equal inputs, plus 1/8.
    EXPECT_TRUE(at::equal(chain->forward(at::ones({1, 8})), at::full({1, 8}, 1 + 3.0 / 8)));
    for (const auto& leaf : model.parameters()) {
      EXPECT_TRUE(at::equal(leaf, at::full_like(leaf, 0.125)));
    }
  });
}

TEST(Offload, AnOptimizerStepIsSeenByTheNextGatherAlsoAfterAnUnusedFetch) {
  auto chain = make_chain(4);
  auto model = fully_shard(
      chain, {.mesh = comm::Mesh(comm::single()), .wrap = wrap_everything(), .offload = slow_file(), .frames = 1});
  chain->forward(at::ones({2, 8})).sum().backward();
  model.engine().record_events(true);
  chain[0]->as<torch::nn::Linear>()->forward(at::ones({2, 8})); // fetches what would come next
  EXPECT_THAT(model.engine().take_events(), ::testing::Contains("fetch 2"));
  std::this_thread::sleep_for(std::chrono::milliseconds(20)); // so that the copy is of the old values
  {
    const at::NoGradGuard no_grad;
    for (auto& leaf : model.parameters()) {
      leaf.fill_(0.5);
    }
  }
  const auto y = chain[2]->as<torch::nn::Linear>()->forward(at::ones({1, 8}));
  EXPECT_TRUE(at::equal(y, at::full({1, 8}, 4.5)));
}

TEST(Offload, OptimizerInBackwardStepsOnStoredGradients) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    std::vector<std::vector<at::Tensor>> results;
    for (const bool offload : {false, true}) {
      auto chain = make_chain(4);
      ShardOptions options{.mesh = comm::Mesh(group), .wrap = wrap_everything()};
      if (offload) {
        options.offload = slow_file();
      }
      auto model = fully_shard(chain, options);
      model.set_optimizer_in_backward([](const std::string&, at::Tensor& leaf) {
        const at::NoGradGuard no_grad;
        leaf.sub_(leaf.grad(), 0.1);
        leaf.mutable_grad() = at::Tensor();
      });
      for (int step = 0; step < 3; ++step) {
        chain->forward(at::full({2, 8}, 1.0 + group->rank())).sum().backward();
      }
      results.emplace_back();
      for (const auto& leaf : model.parameters()) {
        results.back().push_back(leaf.detach().clone());
      }
    }
    for (std::size_t i = 0; i < results[0].size(); ++i) {
      EXPECT_TRUE(at::equal(results[0][i], results[1][i])) << i;
    }
  });
}

TEST(Offload, ACopyThatFailsIsAnErrorOfTheStepAndTheNextStepWorks) {
  auto fail = std::make_shared<std::atomic<bool>>(false);
  auto chain = make_chain(3);
  auto model = fully_shard(
      chain, {.mesh = comm::Mesh(comm::single()),
              .wrap = wrap_everything(),
              .offload = OffloadPolicy{
                  .tier = OffloadTier::kFile, .before_copy = [fail] { TORCH_CHECK(!*fail, "the disk is gone"); }}});
  const auto before = chain->forward(at::ones({2, 8}));
  before.sum().backward();
  *fail = true;
  EXPECT_THAT(error_of([&] { chain->forward(at::ones({2, 8})).sum().backward(); }), HasSubstr("the disk is gone"));
  *fail = false;
  model.reset();
  EXPECT_TRUE(at::equal(chain->forward(at::ones({2, 8})), before));
}

TEST(Offload, AnyCopyOfAStepMayFailAndTheNextStepWorks) {
  auto copies = std::make_shared<std::atomic<int>>(0);
  auto failing = std::make_shared<std::atomic<int>>(-1);
  auto chain = make_chain(3);
  auto model = fully_shard(
      chain, {.mesh = comm::Mesh(comm::single()),
              .wrap = wrap_everything(),
              .offload = OffloadPolicy{.tier = OffloadTier::kFile, .before_copy = [copies, failing] {
                                         TORCH_CHECK((*copies)++ != *failing, "the disk is gone");
                                       }}});
  const auto step = [&] {
    const auto loss = chain->forward(at::ones({2, 8})).sum();
    loss.backward();
    return loss.item<float>();
  };
  step();
  model.zero_grad();
  *copies = 0;
  const auto loss = step();
  const auto expected = model.parameters().front().grad().clone();
  const int all = *copies;
  EXPECT_GE(all, 6); // three shards there, three gradients back
  for (int copy = 0; copy < all; ++copy) {
    model.zero_grad();
    *copies = 0;
    *failing = copy;
    EXPECT_THAT(error_of(step), HasSubstr("the disk is gone")) << "copy " << copy << " of " << all;
    *failing = -1;
    model.reset();
    model.zero_grad();
    ASSERT_EQ(step(), loss) << "after a failure of copy " << copy;
    ASSERT_TRUE(at::equal(model.parameters().front().grad(), expected)) << "after a failure of copy " << copy;
  }
}

TEST(Offload, AllCopiesOfAStepMayFailFromAnyOneOnAndTheNextStepWorks) {
  auto copies = std::make_shared<std::atomic<int>>(0);
  auto failing_from = std::make_shared<std::atomic<int>>(1'000'000);
  auto chain = make_chain(3);
  auto model = fully_shard(
      chain, {.mesh = comm::Mesh(comm::single()),
              .wrap = wrap_everything(),
              .offload = OffloadPolicy{.tier = OffloadTier::kFile, .before_copy = [copies, failing_from] {
                                         TORCH_CHECK((*copies)++ < *failing_from, "the disk is gone");
                                       }}});
  const auto step = [&] { chain->forward(at::ones({2, 8})).sum().backward(); };
  step();
  const auto expected = model.parameters().front().grad().clone();
  const int all = *copies;
  for (int copy = 0; copy < all; ++copy) {
    model.zero_grad();
    *copies = 0;
    *failing_from = copy;
    EXPECT_THAT(error_of(step), HasSubstr("the disk is gone")) << "copies from " << copy << " on of " << all;
    EXPECT_EQ(error_of([&] { model.reset(); }), "") << copy;
    *failing_from = 1'000'000;
    EXPECT_EQ(model.residency().held_bytes, 0) << copy;
    model.zero_grad();
    step();
    ASSERT_TRUE(at::equal(model.parameters().front().grad(), expected)) << "after failures from " << copy << " on";
  }
}

TEST(Offload, ADeferredModelGoesStraightToTheTier) {
  std::vector<std::unique_ptr<Deferred<torch::nn::Linear>>> models;
  torch::manual_seed(4);
  torch::nn::Linear eager(90, 80);
  for (int rank = 0; rank < 2; ++rank) {
    torch::manual_seed(4);
    models.push_back(
        std::make_unique<Deferred<torch::nn::Linear>>(deferred_init([] { return torch::nn::Linear(90, 80); })));
  }
  ebb::test::spawn_ranks(2, [&](const auto& group) {
    auto& deferred = *models[group->rank()];
    auto model = fully_shard(deferred, {.mesh = comm::Mesh(group), .offload = OffloadPolicy{OffloadTier::kFile}});
    EXPECT_EQ(model.residency().offloaded_bytes, model.shard_bytes());
    const auto scope = model.full_parameters({.writeback = false});
    EXPECT_TRUE(at::equal(deferred.model()->weight, eager->weight));
    EXPECT_TRUE(at::equal(deferred.model()->bias, eager->bias));
  });
}

TEST(Offload, PoliciesThatCannotBeAreRefused) {
  const auto refused = [](const OffloadPolicy& policy) {
    return error_of([&] {
      auto chain = make_chain(2);
      (void)fully_shard(chain, {.mesh = comm::Mesh(comm::single()), .offload = policy});
    });
  };
  EXPECT_THAT(refused({OffloadTier::kHost}), AllOf(HasSubstr("on the CPU"), HasSubstr("use OffloadTier::kFile")));
  EXPECT_THAT(
      refused({OffloadTier::kFile, "/nowhere/at/all"}),
      AllOf(HasSubstr("/nowhere/at/all"), HasSubstr("No such file"), HasSubstr("OffloadPolicy::folder")));
}

TEST(Offload, ADiskThatIsFullIsNamedBeforeAnythingIsWritten) {
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &limit), 0);
  const auto before = limit.rlim_cur;
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  limit.rlim_cur = 1 << 20;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  const auto error = error_of([] {
    auto chain = make_chain(1, 1024); // 4 MB
    (void)fully_shard(chain, {.mesh = comm::Mesh(comm::single()), .offload = OffloadPolicy{OffloadTier::kFile}});
  });
  limit.rlim_cur = before;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_THAT(error, AllOf(HasSubstr("cannot reserve"), HasSubstr("File too large"), HasSubstr("free some disk")));
}

TEST(Offload, ExplainNamesTheTier) {
  const ebb::test::TemporaryFolder folder;
  auto chain = make_chain(2);
  auto model = fully_shard(
      chain, {.mesh = comm::Mesh(comm::single()),
              .offload = OffloadPolicy{.tier = OffloadTier::kFile, .folder = folder.path().string()}});
  EXPECT_THAT(model.explain(), HasSubstr("a file in " + folder.path().string()));
}

} // namespace
} // namespace ebb::shard
