#include "reported_support.h"
#include "support/forwarding_communicator.h"

#include <ATen/record_function.h>

#include <algorithm>

namespace ebb::shard {
namespace {

using test::backward_of_all_ranks;
using test::batch;
using test::error_of;
using test::layer;
using test::make_chain;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::array kWorldSizes{1, 2, 4};

/// A bucket for each Linear(8, 8), of 288 bytes.
ReplicateOptions layer_by_layer(const test::Group& group) {
  return {.mesh = comm::Mesh(group), .bucket_bytes = 300, .first_bucket_bytes = 300};
}

at::Tensor through(torch::nn::Sequential net, const at::Tensor& x, const std::vector<int>& layers) {
  auto y = x;
  for (const int i : layers) {
    y = at::tanh(layer(net, i).forward(y));
  }
  return y.pow(2).mean();
}

at::Tensor through_all(torch::nn::Sequential net, int rank, int step) {
  return through(net, batch(rank, step), {0, 1, 2, 3, 4});
}

// One backward may deliver a gradient in parts: each rank's are added up before the ranks' are.
template <class Loss>
void backward_rank_by_rank(torch::nn::Module& plain, int ranks, Loss loss_of) {
  std::vector<at::Tensor> sums(plain.parameters().size());
  for (int rank = 0; rank < ranks; ++rank) {
    plain.zero_grad();
    loss_of(rank).backward();
    for (std::size_t i = 0; i < sums.size(); ++i) {
      const auto& grad = plain.parameters()[i].grad();
      if (grad.defined()) {
        sums[i] = sums[i].defined() ? sums[i] + grad : grad.clone();
      }
    }
  }
  for (std::size_t i = 0; i < sums.size(); ++i) {
    plain.parameters()[i].mutable_grad() = sums[i].defined() ? sums[i] / ranks : sums[i];
  }
}

void expect_bit_equal_gradients(const torch::nn::Module& net, const torch::nn::Module& plain, int step) {
  const auto expected = plain.named_parameters();
  for (const auto& parameter : net.named_parameters()) {
    const auto& grad = parameter.value().grad();
    const auto& whole = expected[parameter.key()].grad();
    ASSERT_EQ(grad.defined(), whole.defined()) << parameter.key() << " at step " << step;
    EXPECT_TRUE(!grad.defined() || at::equal(grad, whole)) << parameter.key() << " at step " << step;
  }
}

/// Trains a chain of five layers as one unsharded process does, bit for bit. `after`: between backward and step.
void expect_bit_equal_training(
    const test::Group& group, const ReplicateOptions& options,
    const std::function<at::Tensor(torch::nn::Sequential, int rank, int step)>& loss_of = through_all,
    const std::function<void(ReplicatedModel&, int step)>& after = {}) {
  auto chain = make_chain(5);
  auto plain = make_chain(5);
  auto model = replicate(chain, options);
  const auto with_momentum = torch::optim::SGDOptions(0.1).momentum(0.9);
  torch::optim::SGD optimizer(model.parameters(), with_momentum);
  torch::optim::SGD reference(plain->parameters(), with_momentum);
  for (int step = 0; step < 4; ++step) {
    loss_of(chain, group->rank(), step).backward();
    if (after) {
      after(model, step);
    }
    backward_rank_by_rank(*plain, group->size(), [&](int rank) { return loss_of(plain, rank, step); });
    expect_bit_equal_gradients(*chain, *plain, step);
    optimizer.step();
    optimizer.zero_grad();
    reference.step();
    reference.zero_grad();
  }
  test::expect_values(*chain, *plain);
}

std::int64_t all_reduces(const test::Group& group) {
  return group->traffic().calls_of(comm::Op::kAllReduce);
}

// DDP's bucket_cap_mb_list
TEST(Buckets, HaveSizesOneByOneOnDemand) {
  for (const int ranks : kWorldSizes) {
    ebb::test::spawn_ranks(ranks, [&](const auto& group) {
      auto options = layer_by_layer(group);
      // From the last layer, biases of 32 and weights of 256 bytes: one bias; a weight and a bias; twice two layers.
      options.bucket_bytes_list = {32, 300, 600};
      std::int64_t before = all_reduces(group);
      expect_bit_equal_training(group, options, through_all, [&](ReplicatedModel& model, int) {
        EXPECT_THAT(model.explain(), HasSubstr("in 4 bucket(s)"));
        EXPECT_EQ(all_reduces(group) - before, 4 + (ranks > 1)); // and the vote
        before = all_reduces(group);
      });
      auto other = make_chain(1);
      options.bucket_bytes_list = {32, 0};
      EXPECT_THAT(error_of([&] { (void)replicate(other, options); }), HasSubstr("in bucket_bytes_list, got 0"));
    });
  }
}

// DDP's skip_all_reduce_unused_params, for which it needs the same unused parameters on all ranks in all steps.
TEST(Buckets, ThatNoRankUsesAreNotReducedOnDemand) {
  for (const int ranks : kWorldSizes) {
    ebb::test::spawn_ranks(ranks, [&](const auto& group) {
      // One layer is used on the last rank alone and one nowhere, others in other steps.
      const auto loss_of = [&](torch::nn::Sequential net, int rank, int step) {
        std::vector<int> layers{0, 4};
        if (rank == ranks - 1) {
          layers.insert(layers.begin() + 1, 1 + step % 3);
        }
        return through(net, batch(rank, step), layers);
      };
      for (const bool skip : {true, false}) {
        auto options = layer_by_layer(group);
        options.skip_unused = skip;
        std::int64_t before = all_reduces(group);
        expect_bit_equal_training(group, options, loss_of, [&](ReplicatedModel&, int) {
          EXPECT_EQ(all_reduces(group) - before, skip ? 3 : 5 + (ranks > 1));
          before = all_reduces(group);
        });
      }
    });
  }
}

// DDP's static_graph
TEST(StaticGraph, AgreesOnceAndReducesDuringBackwardAlthoughParametersAreUnused) {
  for (const int ranks : kWorldSizes) {
    ebb::test::spawn_ranks(ranks, [&](const auto& group) {
      for (const bool is_static : {true, false}) {
        auto options = layer_by_layer(group);
        options.static_graph = is_static;
        std::int64_t before = 0;
        std::int64_t during = 0;
        // Layer 2 is used on the last rank alone, layer 3 nowhere.
        const auto loss_of = [&](torch::nn::Sequential net, int rank, int step) {
          const auto x = layer(net, 0).forward(batch(rank, step));
          if (x.requires_grad()) {
            x.register_hook([&](const at::Tensor& grad) {
              during = all_reduces(group) - before;
              return grad;
            });
          }
          return through(net, x, rank == ranks - 1 ? std::vector{1, 2, 4} : std::vector{1, 4});
        };
        auto chain = make_chain(5);
        auto plain = make_chain(5);
        auto model = replicate(chain, options);
        for (int step = 0; step < 4; ++step) {
          before = all_reduces(group);
          during = 0;
          loss_of(chain, group->rank(), step).backward();
          const auto in_backward = during;
          const auto in_all = all_reduces(group) - before;
          if (is_static && step > 0) {
            EXPECT_EQ(in_backward, 3); // 4, 2, 1
            EXPECT_EQ(in_all, 4);
          } else {
            EXPECT_EQ(in_backward, is_static ? 0 : 1); // 3 is waited for
            EXPECT_EQ(in_all, 5 + (ranks > 1));
          }
          backward_of_all_ranks(*plain, ranks, [&](int rank) { return loss_of(plain, rank, step); });
          expect_bit_equal_gradients(*chain, *plain, step);
          model.zero_grad();
          plain->zero_grad();
        }
      }
    });
  }
}

/// Runs a layer again in backward, by a backward of its own.
struct Recomputed : torch::autograd::Function<Recomputed> {
  using Layer = std::function<at::Tensor(const at::Tensor&)>;
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const Layer* run) {
    context->save_for_backward({x});
    context->saved_data["run"] = reinterpret_cast<std::int64_t>(run);
    return (*run)(x);
  }
  static std::vector<at::Tensor> backward(
      torch::autograd::AutogradContext* context, const std::vector<at::Tensor>& grads) {
    const auto* run = reinterpret_cast<const Layer*>(context->saved_data["run"].toInt());
    const auto x = context->get_saved_variables()[0].detach().set_requires_grad(true);
    at::Tensor y;
    {
      const at::AutoGradMode record(true);
      y = (*run)(x);
    }
    y.backward(grads[0]);
    return {x.grad(), at::Tensor()};
  }
};

// DDP's static_graph allows reentrant backwards of checkpoints.
TEST(StaticGraph, AGradientMayComeInPartsByBackwardsWithinBackward) {
  for (const int ranks : kWorldSizes) {
    ebb::test::spawn_ranks(ranks, [&](const auto& group) {
      // Kept here: a graph holds their addresses.
      std::vector<std::unique_ptr<Recomputed::Layer>> runs;
      const auto loss_of = [&](torch::nn::Sequential net, int rank, int step) {
        auto x = batch(rank, step).set_requires_grad(true);
        for (const int i : {0, 1, 1, 2}) {
          runs.push_back(std::make_unique<Recomputed::Layer>(
              [net, i](const at::Tensor& in) { return at::tanh(layer(net, i).forward(in)); }));
          x = Recomputed::apply(x, runs.back().get());
        }
        return through(net, x, {3, 4});
      };
      auto options = layer_by_layer(group);
      options.static_graph = true;
      expect_bit_equal_training(group, options, loss_of);
      options.static_graph = false;
      auto chain = make_chain(5);
      const auto model = replicate(chain, options);
      EXPECT_THAT(
          error_of([&] { loss_of(chain, group->rank(), 0).backward(); }),
          AllOf(HasSubstr("'1."), HasSubstr("second gradient"), HasSubstr("static_graph")));
    });
  }
}

TEST(StaticGraph, AStepThatBreaksThePromiseNamesTheParameter) {
  for (const int ranks : kWorldSizes) {
    ebb::test::spawn_ranks(ranks, [&](const auto& group) {
      auto options = layer_by_layer(group);
      options.static_graph = true;
      auto chain = make_chain(5);
      auto plain = make_chain(5);
      auto model = replicate(chain, options);
      const auto loss_of = [](torch::nn::Sequential net, int rank, const std::vector<int>& layers) {
        return through(net, batch(rank), layers);
      };
      for (const auto& [other, name] : std::vector<std::pair<std::vector<int>, std::string>>{
               {{0, 1, 2, 3, 4}, "'3."}, {{0, 2, 4}, "'1."}, {{0, 1, 2, 4, 4}, ""}}) {
        const std::vector<int> usual{0, 1, 2, 4};
        loss_of(chain, group->rank(), usual).backward();
        backward_of_all_ranks(*plain, ranks, [&](int rank) { return loss_of(plain, rank, usual); });
        expect_bit_equal_gradients(*chain, *plain, 0);
        model.zero_grad();
        plain->zero_grad();
        const auto error = error_of([&] { loss_of(chain, group->rank(), other).backward(); });
        if (name.empty()) { // used twice in one graph: autograd adds up before the parameter gets it
          EXPECT_EQ(error, "");
        } else {
          EXPECT_THAT(error, AllOf(HasSubstr("static_graph: " + name), HasSubstr("as many gradients")));
        }
        model.zero_grad();
      }
    });
  }
}

/// Remembers which buckets were reduced in what order, and how many were waited for.
class NotedReductions final : public ebb::test::ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;
  std::unique_ptr<comm::Work> all_reduce(
      const at::Tensor& tensor, comm::ReduceOp op, double divisor, std::string_view unit) override {
    if (unit.starts_with("bucket")) {
      started.push_back(std::string(unit.substr(unit.find('\''))));
    }
    return std::make_unique<Noted>(*this, group().all_reduce(tensor, op, divisor, unit));
  }
  std::vector<std::string> started;
  int waits = 0;

 private:
  struct Noted final : comm::Work {
    Noted(NotedReductions& notes, std::unique_ptr<comm::Work> work) : notes(notes), work(std::move(work)) {}
    bool poll() override {
      return work->poll();
    }
    void wait() override {
      ++notes.waits;
      work->wait();
    }
    void release() override {
      work->release();
    }
    NotedReductions& notes;
    std::unique_ptr<comm::Work> work;
  };
};

// DDP's delay_all_reduce_named_params and param_to_hook_all_reduce
TEST(Buckets, OfDelayedParametersAreReducedLastOrAfterTheOneNamed) {
  for (const int ranks : kWorldSizes) {
    ebb::test::spawn_ranks(ranks, [&](const auto& group) {
      for (const bool until : {false, true}) {
        const auto notes = std::make_shared<NotedReductions>(group);
        auto options = layer_by_layer(notes);
        options.delayed_parameters = {"2.weight", "4.bias"};
        options.delay_until = until ? "3.weight" : "";
        expect_bit_equal_training(notes, options, through_all, [&](ReplicatedModel&, int) {
          if (until) {
            EXPECT_THAT(notes->started, ElementsAre("'4.weight'", "'3.weight'", "'4.bias'", "'1.bias'", "'0.bias'"));
          } else {
            EXPECT_THAT(notes->started, ElementsAre("'4.weight'", "'3.weight'", "'1.bias'", "'0.bias'", "'4.bias'"));
          }
          notes->started.clear();
        });
      }
      auto chain = make_chain(5);
      auto options = layer_by_layer(group);
      options.delayed_parameters = {"4.bais"};
      EXPECT_THAT(error_of([&] { (void)replicate(chain, options); }), HasSubstr("got '4.bais'"));
      options.delayed_parameters = {"4.bias"};
      options.delay_until = "4.bias";
      EXPECT_THAT(error_of([&] { (void)replicate(chain, options); }), HasSubstr("delay_until ('4.bias')"));
    });
  }
}

thread_local int foreach_copies = 0; // by this rank

std::unique_ptr<at::ObserverContext> count_foreach_copies(const at::RecordFunction& function) {
  foreach_copies += std::string_view(function.name()) == "aten::_foreach_copy_";
  return nullptr;
}

// DDP's batched_grad_copy
TEST(Buckets, AreFilledByOneCallEachOnDemand) {
  for (const int ranks : kWorldSizes) {
    ebb::test::spawn_ranks(ranks, [&](const auto& group) {
      for (const bool batched : {true, false}) {
        auto options = layer_by_layer(group);
        options.batched_grad_copy = batched;
        const auto handle = at::addThreadLocalCallback(
            at::RecordFunctionCallback(count_foreach_copies).scopes({at::RecordScope::FUNCTION}));
        foreach_copies = 0;
        expect_bit_equal_training(group, options, through_all, [&](ReplicatedModel&, int) {
          EXPECT_EQ(foreach_copies, batched ? 5 : 0);
          foreach_copies = 0;
        });
        at::removeCallback(handle);
      }
    });
  }
}

// DDP's lazy_bucket_allocation
TEST(Buckets, AreInMemoryNoLongerThanTheirGradientsOnDemand) {
  for (const int ranks : kWorldSizes) {
    ebb::test::spawn_ranks(ranks, [&](const auto& group) {
      for (const bool lazy : {true, false}) {
        auto options = layer_by_layer(group);
        options.lazy_bucket_allocation = lazy;
        expect_bit_equal_training(group, options);

        auto chain = make_chain(5);
        auto plain = make_chain(5);
        auto model = replicate(chain, options);
        const auto backward = [&](int step) {
          through_all(chain, group->rank(), step).backward();
          backward_of_all_ranks(*plain, ranks, [&](int rank) { return through_all(plain, rank, step); });
        };
        backward(0);
        std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> memory;
        std::vector<const void*> places;
        for (const auto& parameter : chain->parameters()) {
          const auto& storage = parameter.grad().storage();
          memory.emplace_back(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage.unsafeGetStorageImpl()));
          places.push_back(parameter.grad().data_ptr());
        }
        model.zero_grad(/*set_to_none=*/false);
        plain->zero_grad();
        backward(1); // into the same memory
        expect_bit_equal_gradients(*chain, *plain, 1);
        for (std::size_t i = 0; i < places.size(); ++i) {
          EXPECT_EQ(chain->parameters()[i].grad().data_ptr(), places[i]) << i;
        }
        model.zero_grad();
        plain->zero_grad();
        for (const auto& each : memory) {
          EXPECT_EQ(each.expired(), lazy);
        }
        backward(2);
        expect_bit_equal_gradients(*chain, *plain, 2);
      }
    });
  }
}

torch::nn::Sequential normed_net() {
  return torch::nn::Sequential(torch::nn::Linear(8, 8), torch::nn::BatchNorm1d(8), torch::nn::Linear(8, 3));
}

// DDP's broadcast_buffers and forward_sync_buffers
TEST(ModelBuffers, AreThoseOfRank0OnEveryRankBeforeTheNextForward) {
  for (const int ranks : kWorldSizes) {
    ebb::test::spawn_ranks(ranks, [&](const auto& group) {
      for (const bool broadcasts : {true, false}) {
        auto net = test::built(normed_net);
        auto plain = test::built(normed_net); // sees what rank 0 sees
        auto model = replicate(net, {.mesh = comm::Mesh(group), .broadcast_buffers = broadcasts});
        const auto broadcasts_so_far = [&] { return group->traffic().calls_of(comm::Op::kBroadcast); };
        const auto expect_buffers = [&](bool equal) {
          for (std::size_t i = 0; i < plain->buffers().size(); ++i) {
            const bool counter = !plain->buffers()[i].is_floating_point();
            EXPECT_EQ(at::equal(net->buffers()[i], plain->buffers()[i]), equal || counter) << i;
          }
        };
        for (int step = 0; step < 3; ++step) {
          const auto before = broadcasts_so_far();
          if (step == 1) { // another forward and backward, of which the buffers stay here
            const auto local = model.no_sync();
            net->forward(batch(group->rank(), 7)).pow(2).mean().backward();
            plain->forward(batch(0, 7));
            EXPECT_EQ(broadcasts_so_far(), before);
          }
          net->forward(batch(group->rank(), step)).pow(2).mean().backward();
          plain->forward(batch(0, step));
          // Floats and counters, each in one.
          EXPECT_EQ(broadcasts_so_far() - before, broadcasts && ranks > 1 ? 2 : 0);
          expect_buffers(broadcasts || group->rank() == 0);
          if (!broadcasts) {
            model.sync_buffers();
            expect_buffers(true);
          }
          net->eval();
          plain->eval();
          const at::NoGradGuard no_grad;
          EXPECT_EQ(net->forward(batch(0)).sizes(), plain->forward(batch(0)).sizes());
          EXPECT_TRUE(at::equal(net->forward(batch(0)), plain->forward(batch(0))));
          net->train();
          plain->train();
        }
      }
    });
  }
}

// DDP's finalize_backward and require_manual_backward_finalization
TEST(ManualFinalization, LeavesReductionsUnderWayUntilItIsAskedFor) {
  for (const int ranks : kWorldSizes) {
    ebb::test::spawn_ranks(ranks, [&](const auto& group) {
      const auto notes = std::make_shared<NotedReductions>(group);
      auto options = layer_by_layer(notes);
      const auto finalize = [&](ReplicatedModel& model, int step) {
        if (step == 0) { // ended by itself
          EXPECT_THAT(
              error_of([&] { model.finalize_backward(); }), HasSubstr("expected a backward that waits for its end"));
          model.set_manual_backward_finalization(true);
        } else {
          EXPECT_EQ(notes->started.size(), 5U);
          EXPECT_EQ(notes->waits, 0);
          EXPECT_THAT(
              error_of([&] { model.set_manual_backward_finalization(false); }), HasSubstr("call finalize_backward()"));
          model.finalize_backward();
          EXPECT_EQ(notes->waits, 5 + (ranks > 1));
        }
        notes->started.clear();
        notes->waits = 0;
      };
      expect_bit_equal_training(notes, options, through_all, finalize);

      auto chain = make_chain(5);
      auto plain = make_chain(5);
      auto model = replicate(chain, options);
      model.set_manual_backward_finalization(true);
      {
        const auto local = model.no_sync();
        through_all(chain, group->rank(), 0).backward();
        EXPECT_THAT(error_of([&] { model.finalize_backward(); }), HasSubstr("got none"));
      }
      model.zero_grad();
      through_all(chain, group->rank(), 0).backward();
      EXPECT_THAT(error_of([&] { through_all(chain, group->rank(), 1).backward(); }), HasSubstr("still on their way"));
      model.finalize_backward();
      backward_of_all_ranks(*plain, ranks, [&](int rank) { return through_all(plain, rank, 0); });
      expect_bit_equal_gradients(*chain, *plain, 0);
    });
  }
}

} // namespace
} // namespace ebb::shard
