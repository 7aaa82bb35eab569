#include "streams/recorded_device.h"

#include "ebb/shard/optim.h"
#include "engine.h"
#include "support.h"

#include <algorithm>
#include <functional>
#include <set>

namespace ebb::shard {
namespace {

using test::Hazard;
using test::make_subject;
using test::RecordedDevice;
using test::shard_subject;
using test::wrap_everything;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Group = std::shared_ptr<comm::Communicator>;
using Change = std::function<void(ShardOptions&, const Group&)>;

constexpr int kStreamSteps = 3;

/// A training, and what is done in it.
struct Training {
  std::string name;
  Change change = [](auto&, const auto&) {};
  int ranks = 1;
  bool accumulate = false;
  bool evaluate = false;
  bool optimizer_in_backward = false;
  bool scope = false; ///< Writes to whole parameters between steps.
  bool host = false; ///< Whether the host may wait for the device.
  bool unshard = false; ///< Gathers a unit that is not used before its shard is written.
  bool fails = false; ///< A backward throws half way.
  bool by_hand = false; ///< Backwards are finalized by a call.
  std::function<void(ShardedModel&, bool last)> set = {}; ///< Before each of two backwards a step.
  bool own_stream = true; ///< Whether collectives run on a stream of the communicator's, or else on the current one.
};

void PrintTo(const Training& how, std::ostream* out) {
  *out << how.name;
}

void offload(ShardOptions& options) {
  options.offload = OffloadPolicy{.tier = OffloadTier::kFile};
}

std::vector<Training> trainings() {
  return {
      {"full_shard"},
      {"two_ranks", [](auto&, const auto&) {}, 2},
      {"zero2", [](auto& o, const auto&) { o.strategy = Strategy::kShardGradOp; }},
      {"no_shard", [](auto& o, const auto&) { o.strategy = Strategy::kNoShard; }},
      {"hybrid", [](auto& o, const auto& g) { o.mesh = comm::Mesh::replicate_by_shard(g, 2, 2); }, 4},
      {"neighbours",
       [](auto& o, const auto&) {
         o.unit_options = [](const ModuleInfo&) { return UnitOptions{.reshard_after_forward = 2}; };
       },
       4},
      {"one_frame", [](auto& o, const auto&) { o.frames = 1, o.prefetch = 0; }},
      {"far_ahead", [](auto& o, const auto&) { o.prefetch = 3; }},
      {"bf16", [](auto& o, const auto&) { o.mixed_precision = mixed_precision("bf16"); }},
      {"bf16_hook",
       [](auto& o, const auto&) {
         o.comm_hook = bf16_compress_hook();
         o.gradient_hook = [](const std::string&, at::Tensor& gradient) { gradient.mul_(0.5); };
       }},
      {.name = "accumulation", .accumulate = true},
      {.name = "evaluation", .evaluate = true},
      {.name = "optimizer_in_backward", .optimizer_in_backward = true},
      {.name = "scope", .scope = true},
      {.name = "unshard", .unshard = true},
      {.name = "failure", .fails = true},
      {.name = "failure_bf16_offload",
       .change =
           [](auto& o, const auto&) {
             offload(o);
             o.mixed_precision = mixed_precision("bf16");
           },
       .host = true,
       .fails = true},
      {.name = "on_the_current_stream", .own_stream = false},
      {.name = "scope_bf16",
       .change = [](auto& o, const auto&) { o.mixed_precision = mixed_precision("bf16"); },
       .scope = true},
      {.name = "offload", .change = [](auto& o, const auto&) { offload(o); }, .host = true},
      {.name = "packed_gathers",
       .change = [](auto& o, const auto&) { o.gather_hook = gather_packed(bf16_codec()); },
       .ranks = 2},
      {.name = "backward_post",
       .change = [](auto& o, const auto&) { o.backward_prefetch = BackwardPrefetch::kBackwardPost; }},
      {.name = "not_the_last_backward", .set = [](auto& model, bool last) { model.set_is_last_backward(last); }},
      {.name = "by_hand", .by_hand = true, .set = [](auto&, bool) {}},
      {.name = "many_reductions", .set = [](auto& model, bool) { model.set_reduce_scatter_max_input_buffers(3); }},
      {.name = "no_all_reduce",
       .change = [](auto& o, const auto& g) { o.mesh = comm::Mesh::replicate_by_shard(g, 2, 2); },
       .ranks = 4,
       .set = [](auto& model, bool last) { model.set_requires_all_reduce(last); }},
      {.name = "kept_storage",
       .evaluate = true,
       .set = [](auto& model, bool) { model.set_keep_unsharded_storage(model.units(), true); }},
      {.name = "offload_all",
       .change =
           [](auto& o, const auto&) {
             offload(o);
             o.prefetch = 2;
             o.mixed_precision = mixed_precision("bf16");
           },
       .ranks = 2,
       .accumulate = true,
       .evaluate = true,
       .scope = true,
       .host = true},
  };
}

const Training& training(const std::string& name) {
  static const auto all = trainings();
  return *std::find_if(all.begin(), all.end(), [&](const auto& one) { return one.name == name; });
}

/// Trains on `group`, on the device's streams where there is one. All losses, and the parameters at the end.
std::vector<at::Tensor> train(const Training& how, Group group, RecordedDevice* device, const std::string& kind) {
  if (device && how.own_stream) {
    group = device->over(std::move(group));
  }
  auto subject = make_subject(kind);
  ShardOptions options{.mesh = comm::Mesh(group), .wrap = wrap_everything()};
  how.change(options, group);
  auto model = shard_subject(subject, options);
  if (device) {
    model.engine().use_streams(RecordedDevice::device());
  }
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(1e-2));
  if (how.optimizer_in_backward) {
    model.set_optimizer_in_backward([](const std::string&, at::Tensor& leaf) {
      const at::NoGradGuard no_grad;
      leaf.sub_(leaf.grad(), 0.1);
      leaf.mutable_grad() = at::Tensor();
    });
  }
  model.set_manual_backward_finalization(how.by_hand);
  std::vector<at::Tensor> results;
  for (int step = 0; step < kStreamSteps; ++step) {
    if (how.evaluate) {
      const at::NoGradGuard no_grad;
      results.push_back(subject.loss(step + 50, group->rank()).clone());
    }
    if (how.accumulate) {
      subject.loss(step + 100, group->rank()).backward();
      const auto scope = model.no_sync();
      subject.loss(step + 200, group->rank()).backward();
    }
    if (how.fails && step == 1) {
      const auto half = subject.parameters().size() / 2;
      const auto hook = subject.parameters()[half].second.register_hook(
          [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("half way"); });
      EXPECT_THROW(subject.loss(step, group->rank()).backward(), std::runtime_error);
      subject.parameters()[half].second.remove_hook(hook);
      model.reset();
    }
    if (how.set) {
      how.set(model, /*last=*/false);
      subject.loss(step + 300, group->rank()).backward();
      how.set(model, /*last=*/true);
    }
    auto loss = subject.loss(step, group->rank());
    loss.backward();
    if (how.by_hand) {
      model.finalize_backward().wait();
    }
    results.push_back(loss.detach().clone());
    if (how.unshard) {
      (void)model.unshard({model.units()[1]});
    }
    if (!how.optimizer_in_backward) {
      optimizer.step();
      optimizer.zero_grad();
    }
    if (how.scope) {
      auto scope = model.full_parameters();
      const at::NoGradGuard no_grad;
      for (auto& [name, parameter] : subject.parameters()) {
        parameter.mul_(0.9);
      }
      scope.close();
    }
  }
  for (const auto& leaf : model.parameters()) {
    results.push_back(leaf.detach().clone());
  }
  return results;
}

std::string texts_of(const std::vector<Hazard>& hazards) {
  std::string text;
  for (const auto& hazard : hazards) {
    text += "  " + hazard.text() + "\n";
  }
  return text;
}

class OnStreams : public ::testing::TestWithParam<Training> {};

TEST_P(OnStreams, NothingIsReadBeforeItsWriteOrReusedBeforeItsLastUse) {
  const auto& how = GetParam();
  for (const std::string kind : {"gpt", "mlp"}) {
    ebb::test::spawn_ranks(how.ranks, [&](const auto& group) {
      const auto expected = train(how, group, nullptr, kind);
      RecordedDevice device;
      const auto results = train(how, group, &device, kind);
      EXPECT_THAT(texts_of(device.hazards()), IsEmpty()) << kind;
      EXPECT_GT(device.num_operators(), 200);
      EXPECT_GT(device.waits("compute", "reduce"), 0);
      EXPECT_GT(device.waits("reduce", "compute"), 0);
      EXPECT_EQ(device.waits("reduce", "nccl") > 0, how.own_stream);
      if (how.name != "no_shard") {
        EXPECT_GT(device.waits("gather", "compute"), 0);
        EXPECT_GT(device.waits("compute", "gather"), 0);
        EXPECT_EQ(device.waits("gather", "nccl") > 0, how.own_stream);
      }
      if (how.host) {
        EXPECT_GT(device.waits("gather", "copy"), 0);
        EXPECT_GT(device.waits("host", "copy"), 0);
      } else if (!how.fails) { // the host runs ahead: a step never waits for the device
        for (const std::string stream : {"compute", "gather", "reduce", "copy", "nccl"}) {
          EXPECT_EQ(device.waits("host", stream), 0) << stream;
        }
      }
      ASSERT_EQ(results.size(), expected.size());
      for (std::size_t i = 0; i < results.size(); ++i) {
        EXPECT_TRUE(at::equal(results[i], expected[i])) << kind << ", result " << i;
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(All, OnStreams, ::testing::ValuesIn(trainings()), [](const auto& info) {
  return info.param.name;
});

/// An order that is left out, and a hazard that must then be seen.
struct Missing {
  std::string name = {};
  std::string training = {};
  std::string waiter = {};
  std::string source = {}; ///< One, or two where either is enough: "gather+nccl".
  Hazard::Kind kind;
  std::string first; ///< Part of Hazard::first,
  std::string then; ///< and of Hazard::then.
};

void PrintTo(const Missing& left_out, std::ostream* out) {
  *out << left_out.name;
}

std::vector<Missing> missing() {
  constexpr auto kRead = Hazard::Kind::kReadBeforeWrite;
  constexpr auto kReuse = Hazard::Kind::kReuseBeforeLastUse;
  return {
      {"frame_before_its_last_use", "full_shard", "gather", "compute", kReuse, "m on compute", "all_gather on nccl"},
      {"shard_before_the_optimizer", "full_shard", "gather", "compute", kRead, "addcdiv_ on compute",
       "all_gather on nccl"},
      {"near_slice_before_its_copy", "neighbours", "gather", "compute", kRead, "clone on compute",
       "all_gather on nccl"},
      {"shard_before_a_scope_ends", "scope", "gather", "compute", kRead, "copy_ on compute", "all_gather on nccl"},
      {"parameters_before_the_gather", "full_shard", "compute", "gather", kRead, "all_gather on nccl", "mm on compute"},
      {"write_before_the_gather_has_read", "unshard", "compute", "gather+nccl", kReuse, "all_gather on nccl",
       "mul on compute"},
      {"cast_before_the_gather_has_read", "bf16", "gather", "nccl", kReuse, "all_gather on nccl",
       "next life on gather"},
      {"gather_before_it_is_waited_for", "full_shard", "gather", "nccl", kRead, "all_gather on nccl", "mm on compute"},
      {"cast_before_it_is_made", "bf16", "nccl", "gather", kRead, "on gather", "all_gather on nccl"},
      {"reduction_before_the_gradient", "full_shard", "reduce", "compute", kRead, "copy_ on compute",
       "reduce_scatter on nccl"},
      {"reduction_before_it_is_waited_for", "full_shard", "reduce", "nccl", kRead, "reduce_scatter on nccl",
       "on compute"},
      {"optimizer_before_the_reduction", "full_shard", "compute", "reduce", kRead, "reduce_scatter on nccl",
       "on compute"},
      {"buffer_before_the_reduction_has_read", "full_shard", "compute", "reduce", kReuse, "reduce_scatter on nccl",
       "copy_ on compute"},
      {"optimizer_in_backward_before_the_reduction", "optimizer_in_backward", "compute", "reduce", kRead,
       "reduce_scatter on nccl", "sub_ on compute"},
      {"all_reduce_of_copies_before_the_reduction", "hybrid", "reduce", "nccl", kReuse, "reduce_scatter on nccl",
       "all_reduce on nccl"},
      {"gather_before_the_copy", "offload", "gather", "copy", kRead, "copy_ on copy", "all_gather on nccl"},
      {"copy_before_its_memory_is_free", "offload", "copy", "gather", kReuse, "on gather", "copy_ on copy"},
      {"copy_before_the_reduction", "offload", "copy", "reduce", kRead, "reduce_scatter on nccl", "copy_ on copy"},
      {"host_before_the_gradient_came", "offload", "host", "copy", kRead, "copy_ on copy", "on host"},
      {"host_before_the_shard_was_read", "offload", "host", "copy", kReuse, "copy_ on copy", "mul on host"},
  };
}

// "mm on compute" for the end of "addmm on compute" as well: which operator of a layer it is depends on the model.
bool shows(const std::vector<Hazard>& hazards, const Missing& left_out) {
  return std::any_of(hazards.begin(), hazards.end(), [&](const Hazard& hazard) {
    return hazard.kind == left_out.kind && hazard.first.find(left_out.first) != std::string::npos &&
           hazard.then.find(left_out.then) != std::string::npos;
  });
}

class WithoutAnOrder : public ::testing::TestWithParam<Missing> {};

TEST_P(WithoutAnOrder, AHazardIsSeen) {
  const auto& left_out = GetParam();
  const auto& how = training(left_out.training);
  ebb::test::spawn_ranks(how.ranks, [&](const auto& group) {
    RecordedDevice device;
    for (const auto* source : {"compute", "gather", "reduce", "copy", "nccl"}) {
      if (left_out.source.find(source) != std::string::npos) {
        device.ignore(left_out.waiter, source);
      }
    }
    (void)train(how, group, &device, "gpt");
    const auto hazards = device.hazards();
    EXPECT_TRUE(shows(hazards, left_out))
        << "without waits of " << left_out.waiter << " for " << left_out.source << ":\n"
        << texts_of(hazards);
  });
}

INSTANTIATE_TEST_SUITE_P(All, WithoutAnOrder, ::testing::ValuesIn(missing()), [](const auto& info) {
  return info.param.name;
});

TEST(ReplicateOnStreams, GradientsAreReadAfterTheirBucketsAreReduced) {
  for (const bool waits : {true, false}) {
    RecordedDevice device;
    if (!waits) {
      device.ignore("compute", "nccl");
    }
    auto subject = make_subject("mlp");
    auto model =
        replicate(*subject.module, {.mesh = comm::Mesh(device.over(comm::single())), .first_bucket_bytes = 64});
    torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1));
    for (int step = 0; step < kStreamSteps; ++step) {
      subject.loss(step, 0).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    const auto hazards = device.hazards();
    if (waits) {
      EXPECT_THAT(texts_of(hazards), IsEmpty());
    } else {
      EXPECT_TRUE(
          shows(hazards, {.kind = Hazard::Kind::kReadBeforeWrite, .first = "all_reduce on nccl", .then = "on compute"}))
          << texts_of(hazards);
    }
  }
}

// A single wait, of all that a training makes. Some are there for other orders of use, and missed by none here; but each
// kind of hazard that this training can have shows for the lack of one.
TEST(OneWaitLess, ShowsEveryKindOfHazard) {
  const auto& how = training("full_shard");
  std::int64_t num_waits = 0;
  {
    RecordedDevice device;
    (void)train(how, comm::single(), &device, "mlp");
    num_waits = device.num_waits();
  }
  std::vector<Hazard> all;
  std::int64_t missed = 0;
  for (std::int64_t i = 0; i < num_waits; ++i) {
    RecordedDevice device;
    device.ignore_wait(i);
    (void)train(how, comm::single(), &device, "mlp");
    const auto hazards = device.hazards();
    missed += !hazards.empty();
    all.insert(all.end(), hazards.begin(), hazards.end());
  }
  RecordProperty("waits", static_cast<int>(num_waits));
  RecordProperty("missed", static_cast<int>(missed));
  EXPECT_GT(num_waits, 100);
  EXPECT_GT(missed, num_waits / 3) << "of " << num_waits;
  for (const auto& left_out : missing()) {
    if (left_out.training == how.name) {
      EXPECT_TRUE(shows(all, left_out)) << left_out.name << "\n" << texts_of(all);
    }
  }
}

} // namespace
} // namespace ebb::shard
