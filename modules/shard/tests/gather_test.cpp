#include "support.h"

#include "engine.h"
#include "resident_set.h"

#include <mutex>

namespace ebb::shard {
namespace {

using test::error_of;
using test::make_chain;
using ::testing::Contains;
using ::testing::HasSubstr;

std::int64_t bytes_gathered(const comm::Communicator& group) {
  return group.traffic().bytes_sent[static_cast<std::size_t>(comm::Op::kAllGather)];
}

at::Tensor gather_batch(int rank, int step) {
  return at::full({2, 8}, 0.3 + rank + step);
}

// Three SGD steps on a chain of five; then the values on the shards.
std::vector<at::Tensor> train_chain(
    const std::shared_ptr<comm::Communicator>& group, const ShardOptions& options,
    const std::function<void(ShardedModel&, torch::nn::Sequential&, int step)>& after_forward = {}) {
  auto chain = make_chain(5);
  auto model = fully_shard(chain, options);
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 3; ++step) {
    const auto loss = chain->forward(gather_batch(group->rank(), step)).pow(2).mean();
    if (after_forward) {
      after_forward(model, chain, step);
    }
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  const auto scope = model.full_parameters({.writeback = false});
  std::vector<at::Tensor> values;
  for (const auto& parameter : chain->parameters()) {
    values.push_back(parameter.detach().clone());
  }
  return values;
}

void expect_same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(at::equal(a[i], b[i])) << i;
  }
}

TEST(GatherHook, TheDefaultHookChangesNothing) {
  for (const int ranks : {1, 2, 4}) {
    ebb::test::spawn_ranks(ranks, [](const auto& group) {
      auto options = test::over(group);
      const auto plain = train_chain(group, options);
      options.gather_hook = gather_as_is;
      expect_same(train_chain(group, options), plain);
    });
  }
}

TEST(GatherHook, OneThatThrowsLeavesNothingThatPassesForGathered) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    int gathers = 0;
    int failing = -1;
    auto options = test::over(group);
    options.gather_hook = [&](const ParameterGather& gather) {
      TORCH_CHECK(gathers++ != failing, "no gather today");
      return gather_as_is(gather);
    };
    auto chain = make_chain(4);
    auto plain = make_chain(4);
    auto model = fully_shard(chain, options);
    const auto x = gather_batch(0, 0);
    const auto expected = plain->forward(x);
    const at::NoGradGuard no_grad;
    for (int step = 0; step < 2; ++step) { // without and with an order to prefetch by
      for (int gather = 0; gather < 4; ++gather) {
        gathers = 0;
        failing = gather;
        model.reset(); // gathers all of them again
        EXPECT_THAT(error_of([&] { chain->forward(x); }), HasSubstr("no gather today")) << gather;
        failing = -1;
        EXPECT_TRUE(at::equal(chain->forward(x), expected)) << gather;
      }
    }
  });
}

TEST(GatherHook, WithoutAWorkIsNamed) {
  auto options = test::over(comm::single());
  options.gather_hook = [](const ParameterGather&) -> std::unique_ptr<comm::Work> { return nullptr; };
  auto chain = make_chain(2);
  auto model = fully_shard(chain, options);
  EXPECT_THAT(
      error_of([&] {
        chain->forward(at::ones({1, 8}));
      }),
      HasSubstr("expected gather_hook to return a Work for unit '0', got none"));
  auto reducing = test::over(comm::single());
  reducing.comm_hook = [](const GradientReduction&) -> std::unique_ptr<comm::Work> { return nullptr; };
  auto other = make_chain(2);
  auto reduced = fully_shard(other, reducing);
  EXPECT_THAT(
      error_of([&] {
        other->forward(at::ones({1, 8})).sum().backward();
      }),
      HasSubstr("expected comm_hook to return a Work for unit '1', got none"));
}

TEST(GatherCodec, LeavesIntegersAsTheyAre) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    struct Tabled : torch::nn::Module {
      Tabled() : table(register_parameter("table", at::arange(1000, 1100), /*requires_grad=*/false)) {}
      at::Tensor table;
    } tabled;
    auto options = test::over(group);
    options.gather_hook = gather_packed(int8_codec());
    auto model = fully_shard(tabled, options);
    EXPECT_TRUE(at::equal(tabled.table + 0, at::arange(1000, 1100)));
  });
}

TEST(GatherHook, UsersCanWriteTheirOwn) {
  for (const int ranks : {2, 4}) {
    ebb::test::spawn_ranks(ranks, [](const auto& group) {
      auto options = test::over(group);
      const auto plain = train_chain(group, options);
      std::vector<std::string> units;
      options.gather_hook = [&](const ParameterGather& gather) { // by an all-reduce of zeros
        units.push_back(gather.unit);
        gather.output.zero_();
        gather.output.view({gather.group.size(), -1})[gather.group.rank()].copy_(gather.shard);
        return gather.group.all_reduce(gather.output, comm::ReduceOp::kSum, 1, gather.unit);
      };
      auto chain = make_chain(5);
      auto model = fully_shard(chain, options);
      const auto gathers = group->traffic().calls_of(comm::Op::kAllGather);
      chain->forward(at::ones({2, 8})).sum().backward();
      EXPECT_EQ(group->traffic().calls_of(comm::Op::kAllGather), gathers);
      EXPECT_EQ(static_cast<std::int64_t>(units.size()), model.stats().unshards);
      EXPECT_THAT(units, Contains("3"));
      expect_same(train_chain(group, options), plain);
    });
  }
}

TEST(GatherCodec, Bf16RoundsWhatIsComputedWithAndNotTheMasters) {
  for (const int ranks : {1, 2, 4}) {
    auto masters = make_chain(5);
    torch::optim::SGD optimizer(masters->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 3; ++step) {
      std::vector<at::Tensor> sums;
      for (int rank = 0; rank < ranks; ++rank) {
        auto rounded = make_chain(5);
        for (std::size_t i = 0; i < 10; ++i) {
          rounded->parameters()[i].set_data(masters->parameters()[i].detach().to(at::kBFloat16).to(at::kFloat));
        }
        rounded->forward(gather_batch(rank, step)).pow(2).mean().backward();
        for (std::size_t i = 0; i < 10; ++i) {
          const auto& grad = rounded->parameters()[i].grad();
          rank == 0 ? sums.push_back(grad) : void(sums[i] = sums[i] + grad);
        }
      }
      for (std::size_t i = 0; i < 10; ++i) {
        masters->parameters()[i].mutable_grad() = sums[i] / ranks;
      }
      optimizer.step();
    }
    ebb::test::spawn_ranks(ranks, [&](const auto& group) {
      auto options = test::over(group);
      options.gather_hook = gather_packed(bf16_codec());
      const auto values = train_chain(group, options);
      for (std::size_t i = 0; i < 10; ++i) {
        EXPECT_TRUE(at::equal(values[i], masters->parameters()[i].detach())) << i;
      }
    });
  }
}

TEST(GatherCodec, Int8SendsAByteAnElementAndAScaleABlock) {
  for (const int ranks : {1, 2, 4}) {
    ebb::test::spawn_ranks(ranks, [](const auto& group) {
      auto chain = make_chain(1, 20);
      auto plain = make_chain(1, 20);
      auto options = test::over(group);
      options.gather_hook = gather_packed(int8_codec(/*block=*/16));
      auto model = fully_shard(chain, options);
      const auto before = bytes_gathered(*group);
      const auto seen = chain->parameters()[0].detach().clone();
      const auto shard = model.shard_bytes() / 4; // a multiple of 16
      EXPECT_EQ(bytes_gathered(*group) - before, (group->size() - 1) * (shard + shard / 16 * 4));
      const auto off = (seen - plain->parameters()[0]).abs().max().template item<float>();
      EXPECT_GT(off, 0);
      EXPECT_LE(off, plain->parameters()[0].abs().max().template item<float>() / 253);
      const auto scope = model.full_parameters(); // exact, and so is what it writes back
      EXPECT_TRUE(at::equal(chain->parameters()[0], plain->parameters()[0]));
    });
  }
  EXPECT_THAT(error_of([] { int8_codec(6); }), HasSubstr("got 6"));
  EXPECT_THAT(error_of([] { gather_packed({}); }), HasSubstr("set both functions"));
}

TEST(GatherCodec, ANearbyGatherPassesOnWhatForwardSaw) {
  ebb::test::spawn_ranks(4, [](const auto& group) {
    auto options = test::over(group);
    options.frames = 1;
    options.prefetch = 0;
    options.gather_hook = gather_packed(int8_codec());
    const auto plain = train_chain(group, options);
    options.unit_options = [](const ModuleInfo&) { return UnitOptions{.reshard_after_forward = 2}; };
    expect_same(train_chain(group, options), plain);
  });
}

TEST(CommAllocator, MakesWhatGathersFillAndReductionsRead) {
  for (const int ranks : {1, 2, 4}) {
    ebb::test::spawn_ranks(ranks, [](const auto& group) {
      auto options = test::over(group);
      const auto plain = train_chain(group, options);
      std::vector<at::Tensor> made;
      options.comm_allocator = [&](std::int64_t bytes, c10::Device device) {
        made.push_back(at::empty({bytes + 1}, at::TensorOptions().dtype(at::kByte).device(device)));
        return made.back();
      };
      const auto is_made = [&](const at::Tensor& memory) {
        return std::any_of(made.begin(), made.end(), [&](const auto& one) { return one.is_alias_of(memory); });
      };
      options.gather_hook = [&](const ParameterGather& gather) {
        EXPECT_TRUE(is_made(gather.output)) << gather.unit;
        return gather_as_is(gather);
      };
      options.comm_hook = [&](const GradientReduction& reduction) {
        EXPECT_TRUE(is_made(reduction.input)) << reduction.unit;
        return reduce_as_is(reduction);
      };
      expect_same(train_chain(group, options), plain);
      EXPECT_EQ(made.size(), 3U + 2U + 5U); // frames, reduce buffers, and the units of the last scope
      auto chain = make_chain(1);
      options.comm_allocator = [](std::int64_t, c10::Device) { return at::zeros({1}); };
      auto model = fully_shard(chain, options);
      EXPECT_THAT(error_of([&] { chain->forward(at::ones({2, 8})); }), HasSubstr("expected comm_allocator to return"));
    });
  }
}

TEST(FakeCollectives, SendNothing) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    auto options = test::over(group);
    options.gather_hook = fake_gather;
    options.comm_hook = fake_reduce;
    auto chain = make_chain(3);
    auto model = fully_shard(chain, options);
    const auto calls = [&](comm::Op op) { return group->traffic().calls_of(op); };
    const auto gathers = calls(comm::Op::kAllGather);
    const auto reduces = calls(comm::Op::kReduceScatter);
    chain->forward(at::ones({2, 8})).sum().backward();
    EXPECT_EQ(calls(comm::Op::kAllGather), gathers);
    EXPECT_EQ(calls(comm::Op::kReduceScatter), reduces);
    EXPECT_EQ(model.stats().reduces, 3); // everything else has happened
    EXPECT_GE(model.stats().unshards, 3);
    for (const auto& leaf : model.parameters()) {
      EXPECT_TRUE(leaf.grad().isfinite().all().template item<bool>());
    }
  });
}

TEST(FakeCollectives, AreExactOnOneRank) {
  for (const auto strategy : {Strategy::kFullShard, Strategy::kNoShard}) {
    auto options = test::over(comm::single(), strategy);
    const auto plain = train_chain(options.mesh.world(), options);
    options.gather_hook = fake_gather;
    options.comm_hook = fake_reduce;
    expect_same(train_chain(options.mesh.world(), options), plain);
  }
}

TEST(KeepUnshardedStorage, ParametersAreAtTheSameAddressInEveryStep) {
  for (const int ranks : {1, 2, 4}) {
    ebb::test::spawn_ranks(ranks, [](const auto& group) {
      const auto plain = train_chain(group, test::over(group));
      std::array<const void*, 2> address{};
      const auto kept =
          train_chain(group, test::over(group), [&](ShardedModel& model, torch::nn::Sequential& chain, int step) {
            if (step == 0) {
              model.set_keep_unsharded_storage({"1", "3"}, true);
              model.reshard({"1", "3"});
              chain->parameters()[2].sum();
              chain->parameters()[6].sum();
            } else {
              const auto events = model.engine().take_events();
              EXPECT_EQ(
                  std::count(events.begin(), events.end(), "unshard 1") +
                      std::count(events.begin(), events.end(), "prefetch 1"),
                  1); // since the last forward: backward did not gather it again
            }
            model.engine().record_events(true);
            const std::array now{chain->parameters()[2].data_ptr(), chain->parameters()[6].data_ptr()};
            for (std::size_t i = 0; i < 2; ++i) {
              EXPECT_NE(now[i], nullptr);
              EXPECT_TRUE(step == 0 || address[i] == now[i]) << i << " in step " << step;
              address[i] = now[i];
            }
            EXPECT_GT(model.residency().kept_bytes, 0);
          });
      expect_same(kept, plain);
    });
  }
}

TEST(BackwardPost, AGatherStartsWhenTheUnitInUseIsGivenBack) {
  for (const int ranks : {1, 2, 4}) {
    ebb::test::spawn_ranks(ranks, [](const auto& group) {
      auto options = test::over(group);
      const auto plain = train_chain(group, options);
      std::array<std::int64_t, 2> peak{};
      for (const auto when : {BackwardPrefetch::kBackwardPre, BackwardPrefetch::kBackwardPost}) {
        options.backward_prefetch = when;
        auto chain = make_chain(5);
        auto model = fully_shard(chain, options);
        const auto loss = chain->forward(at::ones({2, 8}).set_requires_grad(true)).sum();
        model.reshard(model.units());
        model.reset_stats();
        model.engine().record_events(true);
        loss.backward();
        const auto events = model.engine().take_events();
        const auto at = [&](const char* event) { return std::find(events.begin(), events.end(), event); };
        ASSERT_NE(at("prefetch 2"), events.end());
        const bool post = when == BackwardPrefetch::kBackwardPost;
        EXPECT_EQ(at("reshard 3") < at("prefetch 2"), post);
        EXPECT_EQ(at("prefetch 2") < at("reduce 3"), true);
        peak[post] = model.residency().peak_held_bytes;
        expect_same(train_chain(group, options), plain);
      }
      EXPECT_EQ(2 * peak[1], peak[0] / 3 * 2);
    });
  }
}

TEST(ShareFrames, ModelsInTurnsHoldNoMoreThanOneOfThem) {
  for (const int ranks : {1, 2, 4}) {
    ebb::test::spawn_ranks(ranks, [](const auto& group) {
      const auto of_both = [&](bool shares, std::int64_t& held) {
        auto first = make_chain(5);
        auto second = make_chain(4);
        auto a = fully_shard(first, test::over(group));
        auto b = fully_shard(second, test::over(group));
        if (shares) {
          share_frames({a, b});
        }
        std::vector<at::Tensor> grads;
        for (int step = 0; step < 2; ++step) {
          a.zero_grad();
          b.zero_grad();
          const auto loss = second->forward(first->forward(gather_batch(group->rank(), step))).pow(2).mean();
          held = a.residency().held_bytes + b.residency().held_bytes;
          EXPECT_EQ(a.residency().frame_bytes, b.residency().frame_bytes);
          EXPECT_GT(b.residency().held_bytes, 0); // in a frame that the first model gave up
          loss.backward();
          for (auto& model : {a, b}) {
            for (const auto& leaf : model.parameters()) {
              grads.push_back(leaf.grad().clone());
            }
          }
        }
        if (shares) { // a model that goes leaves its frames to the other
          { const auto gone = std::exchange(a, b); }
          second->forward(at::ones({2, 8})).sum().backward();
          EXPECT_EQ(b.residency().held_bytes, 0);
        }
        return grads;
      };
      std::int64_t apart = 0;
      std::int64_t together = 0;
      const auto plain = of_both(false, apart);
      expect_same(of_both(true, together), plain);
      EXPECT_EQ(2 * together, apart);
    });
  }
}

TEST(Device, ShardsAreMadeOnTheDeviceNamed) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    auto options = test::over(group);
    const auto plain = train_chain(group, options);
    options.device = at::kCPU;
    expect_same(train_chain(group, options), plain);
    auto chain = make_chain(1);
    options.device = at::kMeta;
    EXPECT_THAT(
        error_of([&] { (void)fully_shard(chain, options); }),
        ::testing::AllOf(HasSubstr("expected a device that this process can use"), HasSubstr("meta")));
    if (!torch::cuda::is_available()) {
      options.device = at::kCUDA;
      EXPECT_THAT(error_of([&] { (void)fully_shard(chain, options); }), HasSubstr("ShardOptions::device cuda"));
    }
    EXPECT_EQ(chain->parameters()[0].numel(), 64); // as it was
    EXPECT_NE(chain->parameters()[0].data_ptr(), nullptr);
  });
}

} // namespace
} // namespace ebb::shard
