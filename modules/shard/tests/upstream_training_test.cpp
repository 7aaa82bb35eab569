#include "counted_memory.h"
#include "ebb/shard/checkpoint.h"

#include "reported_support.h"

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <optional>

// Cases of PyTorch's own tests of FSDP that no other file here has; docs/upstream-tests.md lists them all.
namespace ebb::shard {
namespace {

using test::backward_of_all_ranks;
using test::batch;
using test::expect_gradients;
using test::make_chain;

constexpr int kMicroBatches = 3;
constexpr int kChainUnits = 4;

at::Tensor loss_in(torch::nn::Sequential net, int rank, int micro, std::int64_t width = 8) {
  return net->forward(batch(rank, micro, width)).pow(2).mean();
}

at::Tensor loss_of_all(torch::nn::Sequential net, int rank) {
  auto loss = loss_in(net, rank, 0);
  for (int micro = 1; micro < kMicroBatches; ++micro) {
    loss = loss + loss_in(net, rank, micro);
  }
  return loss;
}

// test_fully_shard_training, accumulation: the collectives of each mode, counted.
TEST(MicroBatches, CommunicateInEveryModeWhatItsFormulaSays) {
  struct Mode {
    Strategy strategy;
    bool keeps_between; ///< set_reshard_after_backward(false) for all micro-batches but the last.
    std::int64_t gathers; ///< In a window. One frame: backward finds the last unit and does not read the first.
  };
  constexpr std::int64_t n = kChainUnits;
  const std::vector<Mode> modes{
      {Strategy::kFullShard, false, kMicroBatches * (n + n - 2)},
      {Strategy::kShardGradOp, false, kMicroBatches * n},
      {Strategy::kShardGradOp, true, n},
      {Strategy::kNoShard, false, 0}};
  for (const int ranks : {1, 2, 4}) {
    for (const bool hybrid : {false, true}) {
      if (hybrid && ranks != 4) {
        continue;
      }
      ebb::test::spawn_ranks(ranks, [&](const auto& group) {
        for (const auto& mode : modes) {
          for (const bool sync_each : {true, false}) {
            auto chain = make_chain(kChainUnits);
            auto plain = make_chain(kChainUnits);
            const auto mesh = hybrid ? comm::Mesh::replicate_by_shard(group, 2, 2) : comm::Mesh(group);
            auto model = fully_shard(
                chain, {.mesh = mesh, .strategy = mode.strategy, .wrap = wrap_by_size(1), .frames = 1, .prefetch = 0});
            torch::optim::SGD optimizer(model.parameters(), 0.1);
            torch::optim::SGD reference(plain->parameters(), 0.1);
            for (int window = 0; window < 2; ++window) {
              model.reset_stats();
              for (int micro = 0; micro < kMicroBatches; ++micro) {
                const bool last = micro + 1 == kMicroBatches;
                if (mode.keeps_between) {
                  model.set_reshard_after_backward(model.units(), last);
                }
                std::optional<NoSync> local;
                if (!sync_each && !last) {
                  local.emplace(model.no_sync());
                }
                loss_in(chain, group->rank(), micro).backward();
              }
              const auto reduces = n * (sync_each ? kMicroBatches : 1);
              EXPECT_EQ(model.stats().unshards, mode.gathers) << name_of(mode.strategy) << mode.keeps_between;
              EXPECT_EQ(model.stats().reduces, reduces);
              EXPECT_EQ(model.stats().all_reduces, hybrid && mode.strategy != Strategy::kNoShard ? reduces : 0);
              EXPECT_TRUE(mode.strategy == Strategy::kNoShard || model.residency().held_bytes == 0);
              backward_of_all_ranks(*plain, ranks, [&](int rank) { return loss_of_all(plain, rank); });
              expect_gradients(model, *plain, 1e-5);
              optimizer.step();
              optimizer.zero_grad();
              reference.step();
              reference.zero_grad();
            }
          }
        }
      });
    }
  }
}

// test_fully_shard_training, 1F1B: forwards of later micro-batches run between a forward and its backward.
TEST(MicroBatches, OfOneForwardOneBackwardPipelinesAddUp) {
  for (const int ranks : {1, 2, 4}) {
    for (const auto strategy : test::kStrategies) {
      ebb::test::spawn_ranks(ranks, [&](const auto& group) {
        auto chain = make_chain(kChainUnits);
        auto plain = make_chain(kChainUnits);
        auto model = fully_shard(chain, test::over(group, strategy));
        for (int repeat = 0; repeat < 2; ++repeat) {
          const auto before = model.stats().reduces;
          std::vector<at::Tensor> losses{loss_in(chain, group->rank(), 0)}; // the warm-up
          for (int micro = 0; micro < kMicroBatches; ++micro) {
            const bool last = micro + 1 == kMicroBatches;
            if (!last) {
              losses.push_back(loss_in(chain, group->rank(), micro + 1));
            }
            std::optional<NoSync> local;
            if (!last) {
              local.emplace(model.no_sync());
            }
            losses[micro].backward();
          }
          EXPECT_EQ(model.stats().reduces - before, kChainUnits);
          EXPECT_TRUE(strategy == Strategy::kNoShard || model.residency().held_bytes == 0);
          backward_of_all_ranks(*plain, ranks, [&](int rank) { return loss_of_all(plain, rank); });
          expect_gradients(model, *plain, 1e-5);
          model.zero_grad();
          plain->zero_grad();
        }
      });
    }
  }
}

// test_fully_shard_training, chunked loss: the head runs both ways for each chunk before the trunk's backward.
TEST(MicroBatches, OfALossInChunksReduceTheHeadOnce) {
  const auto trunk = [](torch::nn::Sequential net, const at::Tensor& x) {
    return at::tanh(test::layer(net, 1).forward(at::tanh(test::layer(net, 0).forward(x))));
  };
  const auto head_loss = [](torch::nn::Sequential net, const at::Tensor& hidden) {
    return test::layer(net, 3).forward(test::layer(net, 2).forward(hidden)).pow(2).sum();
  };
  for (const int ranks : {1, 2, 4}) {
    for (const auto strategy : test::kStrategies) {
      ebb::test::spawn_ranks(ranks, [&](const auto& group) {
        auto chain = make_chain(kChainUnits);
        auto plain = make_chain(kChainUnits);
        auto model = fully_shard(chain, test::over(group, strategy));
        const auto hidden = trunk(chain, batch(group->rank()));
        const auto cut = hidden.detach().set_requires_grad(true);
        {
          const auto local = model.no_sync();
          for (const auto& chunk : cut.chunk(2)) {
            head_loss(chain, chunk).backward();
          }
        }
        hidden.backward(cut.grad());
        EXPECT_EQ(model.stats().reduces, kChainUnits);
        backward_of_all_ranks(*plain, ranks, [&](int rank) { return head_loss(plain, trunk(plain, batch(rank))); });
        expect_gradients(model, *plain, 1e-5);
        EXPECT_TRUE(strategy == Strategy::kNoShard || model.residency().held_bytes == 0);
      });
    }
  }
}

// test_fsdp_uneven, and the sizes of test_fully_shard_training's hybrid test
TEST(OddSizes, TrainAsUnshardedBitForBit) {
  for (const std::int64_t width : {3, 5, 16, 17}) {
    for (const int ranks : {1, 2, 3, 4}) {
      for (const auto strategy : test::kStrategies) {
        ebb::test::spawn_ranks(ranks, [&](const auto& group) {
          auto chain = make_chain(2, width);
          auto plain = make_chain(2, width);
          auto model = fully_shard(chain, test::over(group, strategy));
          torch::optim::Adam optimizer(model.parameters(), torch::optim::AdamOptions(1e-2));
          torch::optim::Adam reference(plain->parameters(), torch::optim::AdamOptions(1e-2));
          for (int step = 0; step < 3; ++step) {
            loss_in(chain, group->rank(), step, width).backward();
            backward_of_all_ranks(*plain, ranks, [&](int rank) { return loss_in(plain, rank, step, width); });
            expect_gradients(model, *plain);
            optimizer.step();
            optimizer.zero_grad();
            reference.step();
            reference.zero_grad();
          }
          test::expect_parameters(model, *chain, *plain);
        });
      }
    }
  }
}

// test_fully_shard_training, hybrid: with resharding or without, checkpoints, offload, and the last batch alone reduced
TEST(OddSizes, TrainAsUnshardedOnHybridMeshesWithEverythingElse) {
  for (const std::int64_t width : {3, 16, 17}) {
    ebb::test::spawn_ranks(4, [&](const auto& group) {
      for (const std::string variant : {"plain", "zero2", "integer", "checkpoint", "offload", "last_alone"}) {
        auto chain = make_chain(3, width);
        auto plain = make_chain(3, width);
        auto options = test::over(group);
        options.mesh = comm::Mesh::replicate_by_shard(group, 2, 2);
        if (variant == "zero2") {
          options.strategy = Strategy::kHybridShardZero2;
        } else if (variant == "integer") {
          options.unit_options = [](const ModuleInfo&) { return UnitOptions{.reshard_after_forward = 2}; };
        } else if (variant == "offload") {
          options.offload = OffloadPolicy{OffloadTier::kFile};
        }
        auto model = fully_shard(chain, options);
        torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
        torch::optim::SGD reference(plain->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
        const auto loss_of = [&](torch::nn::Sequential net, int rank, int micro, bool recompute) {
          auto x = batch(rank, micro, width);
          for (int i = 0; i < 3; ++i) {
            const auto run = [net, i](const at::Tensor& in) { return at::gelu(test::layer(net, i).forward(in)); };
            x = recompute ? checkpoint(run, x) : run(x);
          }
          return x.pow(2).mean();
        };
        for (int step = 0; step < 3; ++step) {
          if (variant == "last_alone") {
            const auto local = model.no_sync();
            loss_of(chain, group->rank(), step + 10, false).backward();
            EXPECT_EQ(model.stats().all_reduces, 3 * step);
          }
          loss_of(chain, group->rank(), step, variant == "checkpoint").backward();
          EXPECT_EQ(model.stats().all_reduces, 3 * (step + 1)) << variant;
          backward_of_all_ranks(*plain, 4, [&](int rank) {
            auto loss = loss_of(plain, rank, step, false);
            return variant == "last_alone" ? loss + loss_of(plain, rank, step + 10, false) : loss;
          });
          expect_gradients(model, *plain, 1e-5);
          optimizer.step();
          optimizer.zero_grad();
          reference.step();
          reference.zero_grad();
        }
        test::expect_parameters(model, *chain, *plain, 1e-5);
      }
    });
  }
}

// test_fully_shard_training, world size 1
TEST(OneRank, SendsNothingAndTrainsAsUnsharded) {
  for (const auto strategy : test::kStrategies) {
    ebb::test::spawn_ranks(1, [&](const auto& group) {
      auto chain = make_chain(kChainUnits);
      auto plain = make_chain(kChainUnits);
      auto model = fully_shard(chain, test::over(group, strategy));
      torch::optim::SGD optimizer(model.parameters(), 0.1);
      torch::optim::SGD reference(plain->parameters(), 0.1);
      for (int step = 0; step < 3; ++step) {
        loss_in(chain, 0, step).backward();
        loss_in(plain, 0, step).backward();
        expect_gradients(model, *plain);
        optimizer.step();
        optimizer.zero_grad();
        reference.step();
        reference.zero_grad();
      }
      model.clip_grad_norm_(1);
      test::expect_parameters(model, *chain, *plain);
      EXPECT_EQ(group->traffic().total_bytes_sent(), 0);
      EXPECT_EQ(group->capabilities().backend, "single"); // no network is opened
    });
  }
}

// test_fsdp_pure_fp16: a model that was converted before it is sharded computes, reduces and steps in that dtype.
TEST(PureHalf, AModelConvertedBeforeShardingTrainsInItsDtype) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    for (const int ranks : {1, 2, 4}) {
      ebb::test::spawn_ranks(ranks, [&](const auto& group) {
        auto chain = make_chain(3);
        auto plain = make_chain(3);
        chain->to(dtype);
        plain->to(dtype);
        auto model = fully_shard(chain, test::over(group));
        // A power of two: LibTorch rounds other products in another way at the end of a tensor, where no vector fits.
        torch::optim::SGD optimizer(model.parameters(), 1.0 / 64);
        torch::optim::SGD reference(plain->parameters(), 1.0 / 64);
        const auto loss_of = [&](torch::nn::Sequential net, int rank, int step) {
          return net->forward(batch(rank, step).to(dtype)).pow(2).sum();
        };
        for (int step = 0; step < 3; ++step) {
          const auto loss = loss_of(chain, group->rank(), step);
          EXPECT_EQ(loss.scalar_type(), dtype);
          loss.backward();
          // The sum is taken in float and rounded once.
          std::vector<at::Tensor> sums;
          for (int rank = 0; rank < ranks; ++rank) {
            loss_of(plain, rank, step).backward();
            std::size_t i = 0;
            for (auto& parameter : plain->parameters()) {
              auto& grad = parameter.mutable_grad();
              if (sums.size() <= i) {
                sums.push_back(grad.to(at::kFloat));
              } else {
                sums[i].add_(grad.to(at::kFloat));
              }
              grad = at::Tensor();
              ++i;
            }
          }
          for (std::size_t i = 0; i < sums.size(); ++i) {
            plain->parameters()[i].mutable_grad() = (sums[i] / ranks).to(dtype);
          }
          for (const auto& leaf : model.parameters()) {
            EXPECT_EQ(leaf.scalar_type(), dtype);
            EXPECT_EQ(leaf.grad().scalar_type(), dtype);
          }
          expect_gradients(model, *plain);
          optimizer.step();
          optimizer.zero_grad();
          reference.step();
          reference.zero_grad();
        }
        test::expect_parameters(model, *chain, *plain);
      });
    }
  }
}

// test_fully_shard_memory, test_fsdp_memory
TEST(MemoryOfAStep, StaysUnderItsBoundInEveryPhaseAndIsGoneWithTheModel) {
  constexpr std::int64_t kWidth = 64;
  constexpr int kDeep = 8;
  for (const int ranks : {1, 2, 4}) {
    ebb::test::spawn_ranks(ranks, [&](const auto& group) {
      // Weight and bias, 4,160 elements, a multiple of 16 on every rank.
      constexpr std::int64_t kUnit = 4 * (kWidth * kWidth + kWidth);
      const std::int64_t shards = kDeep * kUnit / ranks;
      // Inputs, outputs and what autograd and optimizers keep for a moment: small beside a unit.
      constexpr std::int64_t kSlack = kUnit / 2;
      const auto x = batch(group->rank(), 0, kWidth);
      test::CountedMemory memory;
      {
        auto chain = make_chain(kDeep, kWidth);
        EXPECT_GE(memory.now(), kDeep * kUnit);
        auto model = fully_shard(chain, test::over(group)); // 2 frames and 1 for prefetch
        // Among ranks the group may hold one tensor more, what was broadcast last, until it is called again.
        EXPECT_LE(memory.now(), shards + (ranks > 1 ? kUnit : 0) + kSlack);
        torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
        std::int64_t state = 0;
        for (int step = 0; step < 3; ++step) {
          memory.peak();
          const auto before = memory.now(); // with gradients that were dropped: they go as forward begins
          const auto loss = chain->forward(x).pow(2).mean();
          // Frames and reduce buffers stay for the next step.
          const auto bound = shards + state + 3 * kUnit + (step == 0 ? 0 : 2 * kUnit) + kSlack;
          EXPECT_LE(memory.now(), bound) << "after forward of step " << step;
          EXPECT_LE(memory.peak(), std::max(before, bound)) << "forward of step " << step;
          loss.backward();
          // Gradients of a unit before they are in the buffer: weight and bias.
          EXPECT_LE(memory.peak(), shards + state + shards + 3 * kUnit + 2 * kUnit + kUnit + kSlack)
              << "backward of step " << step;
          EXPECT_LE(memory.now(), shards + state + shards + 3 * kUnit + 2 * kUnit + kSlack);
          optimizer.step();
          state = shards;
          EXPECT_LE(memory.peak(), shards + state + shards + 3 * kUnit + 2 * kUnit + kSlack)
              << "optimizer of step " << step;
          optimizer.zero_grad();
        }
      }
      EXPECT_LE(memory.now(), 0) << "after the model";
    });
  }
}

} // namespace
} // namespace ebb::shard
