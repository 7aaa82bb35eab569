#include "support.h"

#include <mutex>

namespace ebb::shard {
namespace {

using test::error_of;
using test::make_chain;
using test::make_subject;
using test::shard_subject;
using test::wrap_everything;
using ::testing::HasSubstr;

constexpr int kMixedSteps = 4;

// One unsharded process with fp32 masters: each rank's gradient by a model in `dtype`, sums in fp32 in rank order.
std::vector<at::Tensor> run_mixed_reference(const std::string& kind, int ranks, at::ScalarType dtype) {
  auto masters = make_subject(kind);
  auto compute = make_subject(kind, dtype);
  std::vector<at::Tensor> parameters;
  for (const auto& [name, tensor] : masters.parameters()) {
    parameters.push_back(tensor);
  }
  torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
  for (int step = 0; step < kMixedSteps; ++step) {
    std::vector<at::Tensor> sums(parameters.size());
    for (int rank = 0; rank < ranks; ++rank) {
      const auto low = compute.parameters();
      for (std::size_t i = 0; i < low.size(); ++i) {
        const at::NoGradGuard no_grad;
        low[i].second.copy_(parameters[i]);
        low[i].second.mutable_grad() = at::Tensor();
      }
      compute.loss(step, rank).backward();
      for (std::size_t i = 0; i < low.size(); ++i) {
        const auto grad = low[i].second.grad().to(at::kFloat);
        sums[i] = sums[i].defined() ? sums[i] + grad : grad;
      }
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].mutable_grad() = sums[i] / ranks;
    }
    optimizer.step();
  }
  std::vector<at::Tensor> values;
  for (const auto& parameter : parameters) {
    values.push_back(parameter.detach().clone());
  }
  return values;
}

class Mixed : public ::testing::TestWithParam<std::tuple<Strategy, int, std::string, at::ScalarType>> {};

TEST_P(Mixed, TrainsFp32MastersAsOneUnshardedProcessThatComputesInTheLowDtype) {
  const auto& [strategy, ranks, kind, dtype] = GetParam();
  const auto expected = run_mixed_reference(kind, ranks, dtype);
  std::mutex mutex;
  ebb::test::spawn_ranks(ranks, [&, strategy = strategy, kind = kind, dtype = dtype](const auto& group) {
    auto subject = make_subject(kind);
    MixedPrecision mixed{.param_dtype = dtype, .reduce_dtype = at::kFloat};
    mixed.keep_full = {};
    auto model = shard_subject(
        subject,
        {.mesh = comm::Mesh(group), .strategy = strategy, .wrap = wrap_everything(), .mixed_precision = mixed});
    torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
    for (int step = 0; step < kMixedSteps; ++step) {
      subject.loss(step, group->rank()).backward();
      for (const auto& leaf : model.parameters()) {
        EXPECT_EQ(leaf.scalar_type(), at::kFloat);
        EXPECT_EQ(leaf.grad().scalar_type(), at::kFloat);
      }
      optimizer.step();
      optimizer.zero_grad();
    }
    for (const auto& [name, tensor] : subject.parameters()) {
      EXPECT_EQ(tensor.scalar_type(), dtype) << name;
    }
    auto scope = model.full_parameters({.writeback = false});
    const std::lock_guard lock(mutex);
    std::size_t i = 0;
    for (const auto& [name, tensor] : subject.parameters()) {
      EXPECT_EQ(tensor.scalar_type(), at::kFloat) << name;
      EXPECT_TRUE(at::equal(tensor, expected[i])) << name;
      ++i;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    All, Mixed,
    ::testing::Combine(
        ::testing::Values(Strategy::kFullShard, Strategy::kShardGradOp, Strategy::kNoShard), ::testing::Values(1, 2),
        ::testing::Values("gpt"), ::testing::Values(at::kBFloat16, at::kHalf)),
    [](const auto& info) {
      return std::string(name_of(std::get<0>(info.param))) + "_" + std::to_string(std::get<1>(info.param)) + "ranks_" +
             std::get<2>(info.param) + "_" + c10::toString(std::get<3>(info.param));
    });

TEST(MixedPrecision, GathersHalfTheBytesAndReducesInTheReductionsDtype) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    const auto bytes = [&](comm::Op op) { return group->traffic().bytes_sent[static_cast<std::size_t>(op)]; };
    const auto of_a_step = [&](const MixedPrecision& mixed) {
      auto chain = make_chain(4, 16);
      auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1), .mixed_precision = mixed});
      const auto gathered = bytes(comm::Op::kAllGather);
      const auto reduced = bytes(comm::Op::kReduceScatter);
      chain->forward(at::ones({2, 16})).sum().backward();
      return std::pair(bytes(comm::Op::kAllGather) - gathered, bytes(comm::Op::kReduceScatter) - reduced);
    };
    const auto full = of_a_step({});
    const auto low = of_a_step({.param_dtype = at::kBFloat16});
    const auto both = of_a_step({.param_dtype = at::kBFloat16, .reduce_dtype = at::kBFloat16});
    EXPECT_EQ(2 * low.first, full.first);
    EXPECT_EQ(low.second, full.second);
    EXPECT_EQ(2 * both.second, full.second);
  });
}

TEST(MixedPrecision, NormsStayInFullPrecisionByDefault) {
  auto subject = make_subject("gpt");
  auto model = shard_subject(
      subject, {.mesh = comm::Mesh(comm::single()),
                .wrap = wrap_by_class({"Block"}),
                .mixed_precision = mixed_precision("bf16")});
  subject.loss(0, 0).backward();
  for (const auto& [name, tensor] : subject.parameters()) {
    EXPECT_EQ(tensor.scalar_type(), name.find("norm") == std::string::npos ? at::kBFloat16 : at::kFloat) << name;
  }
  EXPECT_THAT(model.explain(), HasSubstr("BFloat16 from Float, reduced in Float, gradients Float"));
}

TEST(MixedPrecision, ExceptionsTakeAnyPolicyAndTheModelStillRuns) {
  auto chain = make_chain(4);
  MixedPrecision mixed{.param_dtype = at::kBFloat16};
  mixed.keep_full = wrap_by_name({"1"});
  auto model =
      fully_shard(chain, {.mesh = comm::Mesh(comm::single()), .wrap = wrap_by_size(1), .mixed_precision = mixed});
  const auto out = chain->forward(at::ones({2, 8}));
  out.sum().backward();
  EXPECT_EQ(out.scalar_type(), at::kBFloat16);
  EXPECT_EQ(chain->parameters()[2].scalar_type(), at::kFloat);
  EXPECT_EQ(chain->parameters()[0].scalar_type(), at::kBFloat16);
}

TEST(MixedPrecision, LowPrecisionGradientsAreKeptOnDemand) {
  auto chain = make_chain(2);
  MixedPrecision mixed{.param_dtype = at::kBFloat16, .reduce_dtype = at::kBFloat16, .keep_low_precision_grads = true};
  auto model =
      fully_shard(chain, {.mesh = comm::Mesh(comm::single()), .wrap = wrap_by_size(1), .mixed_precision = mixed});
  chain->forward(at::ones({2, 8})).sum().backward();
  for (const auto& leaf : model.parameters()) {
    EXPECT_EQ(leaf.grad().scalar_type(), at::kBFloat16);
    EXPECT_EQ(leaf.scalar_type(), at::kFloat);
  }
}

TEST(MixedPrecision, InputsAreLeftAloneOnDemand) {
  auto chain = make_chain(1);
  MixedPrecision mixed{.param_dtype = at::kBFloat16, .cast_forward_inputs = false};
  auto model =
      fully_shard(chain, {.mesh = comm::Mesh(comm::single()), .wrap = wrap_by_size(1), .mixed_precision = mixed});
  EXPECT_NE(error_of([&] { chain->forward(at::ones({2, 8})); }), "");
  EXPECT_EQ(chain->forward(at::ones({2, 8}, at::kBFloat16)).scalar_type(), at::kBFloat16);
}

TEST(MixedPrecision, FloatInputsGetFloatGradients) {
  auto chain = make_chain(2);
  auto model = fully_shard(
      chain, {.mesh = comm::Mesh(comm::single()), .wrap = wrap_by_size(1), .mixed_precision = mixed_precision("bf16")});
  auto x = at::ones({2, 8}).set_requires_grad(true);
  const auto out = model.cast_output(chain->forward(x));
  EXPECT_EQ(out.scalar_type(), at::kFloat);
  out.sum().backward();
  EXPECT_EQ(x.grad().scalar_type(), at::kFloat);
}

TEST(MixedPrecision, AScopeShowsTheMastersAndWritesThemBackWithoutLoss) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    auto chain = make_chain(2);
    auto plain = make_chain(2);
    auto model = fully_shard(
        chain, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1), .mixed_precision = mixed_precision("bf16")});
    {
      auto scope = model.full_parameters();
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(at::equal(chain->parameters()[0], plain->parameters()[0]));
      chain->parameters()[0].add_(1e-6); // below what bf16 can tell apart
    }
    EXPECT_EQ(model.residency().held_bytes, 0);
    EXPECT_EQ(chain->parameters()[0].scalar_type(), at::kBFloat16);
    auto scope = model.full_parameters();
    EXPECT_TRUE(at::equal(chain->parameters()[0], plain->parameters()[0] + 1e-6));
  });
}

TEST(MixedPrecision, BuffersAreConvertedButThoseOfNorms) {
  struct NetImpl : torch::nn::Module {
    NetImpl()
        : norm(register_module("norm", torch::nn::BatchNorm1d(4))),
          linear(register_module("linear", torch::nn::Linear(4, 4))),
          scale(register_buffer("scale", at::full({4}, 3.0))) {}
    torch::nn::BatchNorm1d norm;
    torch::nn::Linear linear;
    at::Tensor scale;
  };
  NetImpl net;
  auto model = fully_shard(
      net, {.mesh = comm::Mesh(comm::single()), .wrap = wrap_root(), .mixed_precision = mixed_precision("bf16")});
  EXPECT_EQ(net.scale.scalar_type(), at::kBFloat16);
  EXPECT_EQ(net.norm->running_mean.scalar_type(), at::kFloat);
}

struct ScaledImpl : torch::nn::Module {
  ScaledImpl()
      : weight(register_parameter("weight", at::linspace(-1, 1, 64).view({8, 8}).clone())),
        scale(register_parameter("scale", at::linspace(0.5, 1.5, 8))),
        shift(register_buffer("shift", at::full({8}, 0.3))) {}
  at::Tensor forward(const at::Tensor& x) {
    return at::linear(x, weight) * scale + shift;
  }
  at::Tensor weight;
  at::Tensor scale;
  at::Tensor shift;
};

TEST(ParamDtypeOverride, ChoosesADtypeParameterByParameter) {
  for (const int ranks : {1, 2, 4}) {
    ebb::test::spawn_ranks(ranks, [](const auto& group) {
      ScaledImpl net;
      ScaledImpl plain;
      MixedPrecision mixed;
      mixed.param_dtype_override_fn = [](const std::string& name, const at::Tensor& parameter) {
        EXPECT_EQ(parameter.scalar_type(), at::kFloat);
        return name == "weight" ? std::optional(at::kBFloat16) : std::nullopt;
      };
      auto model = fully_shard(net, {.mesh = comm::Mesh(group), .wrap = wrap_root(), .mixed_precision = mixed});
      EXPECT_EQ(net.weight.scalar_type(), at::kBFloat16);
      EXPECT_EQ(net.scale.scalar_type(), at::kFloat);
      const auto x = at::linspace(0, 1, 16).view({2, 8});
      const auto low = plain.weight.detach().to(at::kBFloat16).set_requires_grad(true);
      const auto expected = at::linear(x.to(at::kBFloat16), low) * plain.scale;
      EXPECT_TRUE(at::equal(net.forward(x), expected + plain.shift));
      net.forward(x).sum().backward();
      expected.sum().backward();
      const auto scope = model.full_parameters({.writeback = false, .with_grads = true});
      EXPECT_TRUE(at::equal(net.weight.grad(), low.grad().to(at::kFloat)));
      EXPECT_TRUE(at::equal(net.scale.grad(), plain.scale.grad()));
    });
  }
}

TEST(ParamDtypeOverride, GoesBeforeParamDtypeAndKeepFullAndMustBeADtypeToComputeIn) {
  const auto dtypes = [](const MixedPrecision& mixed) {
    auto chain = make_chain(3);
    auto model =
        fully_shard(chain, {.mesh = comm::Mesh(comm::single()), .wrap = wrap_by_size(1), .mixed_precision = mixed});
    return std::tuple(
        chain->parameters()[0].scalar_type(), chain->parameters()[2].scalar_type(),
        chain->parameters()[4].scalar_type());
  };
  MixedPrecision mixed{.param_dtype = at::kBFloat16};
  mixed.keep_full = wrap_by_name({"1"});
  EXPECT_EQ(dtypes(mixed), std::tuple(at::kBFloat16, at::kFloat, at::kBFloat16));
  mixed.param_dtype_override_fn = [](const std::string& name, const at::Tensor&) {
    return name[0] == '2' ? std::nullopt : std::optional(at::kHalf);
  };
  EXPECT_EQ(dtypes(mixed), std::tuple(at::kHalf, at::kHalf, at::kBFloat16));
  mixed.param_dtype_override_fn = [](const std::string&, const at::Tensor&) { return std::optional(at::kLong); };
  EXPECT_THAT(error_of([&] { dtypes(mixed); }), ::testing::AllOf(HasSubstr("Long"), HasSubstr("'0.weight'")));
}

TEST(FullPrecision, EvaluatesAsTheUnshardedFloatModelAndTrainingGoesOnAsBefore) {
  for (const auto strategy : {Strategy::kFullShard, Strategy::kNoShard}) {
    for (const int ranks : {1, 2, 4}) {
      ebb::test::spawn_ranks(ranks, [&](const auto& group) {
        const auto x = at::linspace(0, 1, 16).view({2, 8});
        const auto train = [&](bool evaluates) {
          ScaledImpl net;
          auto model = fully_shard(
              net, {.mesh = comm::Mesh(group),
                    .strategy = strategy,
                    .wrap = wrap_root(),
                    .mixed_precision = mixed_precision("bf16")});
          torch::optim::SGD optimizer(model.parameters(), 0.1);
          for (int step = 0; step < 3; ++step) {
            if (evaluates) {
              const auto bytes = model.residency().frame_bytes;
              model.set_full_precision(true);
              EXPECT_GT(model.residency().frame_bytes, bytes);
              const at::NoGradGuard no_grad;
              const auto y = net.forward(x);
              EXPECT_EQ(y.scalar_type(), at::kFloat);
              EXPECT_EQ(net.shift.scalar_type(), at::kFloat);
              ScaledImpl plain;
              {
                const auto scope = model.full_parameters({.writeback = false});
                plain.weight.copy_(net.weight);
                plain.scale.copy_(net.scale);
              }
              EXPECT_TRUE(at::equal(y, at::linear(x, plain.weight) * plain.scale + net.shift));
              model.set_full_precision(false);
              EXPECT_EQ(net.weight.scalar_type(), at::kBFloat16);
              EXPECT_EQ(net.shift.scalar_type(), at::kBFloat16);
              EXPECT_EQ(model.residency().frame_bytes, bytes);
            }
            net.forward(x + group->rank()).pow(2).mean().backward();
            optimizer.step();
            optimizer.zero_grad();
          }
          const auto scope = model.full_parameters({.writeback = false});
          return std::pair(net.weight.detach().clone(), net.scale.detach().clone());
        };
        const auto plain = train(false);
        const auto with = train(true);
        EXPECT_TRUE(at::equal(plain.first, with.first));
        EXPECT_TRUE(at::equal(plain.second, with.second));
      });
    }
  }
}

TEST(FullPrecision, SwitchedBetweenAForwardAndItsBackwardIsNamed) {
  auto chain = make_chain(2);
  auto model = fully_shard(
      chain, {.mesh = comm::Mesh(comm::single()), .wrap = wrap_by_size(1), .mixed_precision = mixed_precision("bf16")});
  const auto loss = chain->forward(at::ones({2, 8}).set_requires_grad(true)).sum();
  model.set_full_precision(true);
  EXPECT_THAT(error_of([&] { loss.backward(); }), HasSubstr("switched between a forward and its backward"));
  model.set_full_precision(false);
  chain->forward(at::ones({2, 8})).sum().backward();
  EXPECT_TRUE(model.parameters()[0].grad().defined());
}

TEST(MixedPrecision, UnknownPresetsAndDtypesAreNamed) {
  EXPECT_THAT(error_of([] { mixed_precision("int8"); }), HasSubstr("got 'int8'"));
  auto chain = make_chain(1);
  EXPECT_THAT(
      error_of([&] {
        (void)fully_shard(
            chain,
            {.mesh = comm::Mesh(comm::single()), .wrap = wrap_root(), .mixed_precision = {.param_dtype = at::kLong}});
      }),
      HasSubstr("Long"));
}

} // namespace
} // namespace ebb::shard
