#include "ebb/shard/checkpoint.h"

#include "engine.h"
#include "support.h"

#include <ATen/autocast_mode.h>

namespace ebb::shard {
namespace {

using test::error_of;
using test::make_chain;
using ::testing::HasSubstr;

// Linear, dropout, GELU: what a checkpoint must get right.
at::Tensor layer(torch::nn::Sequential& chain, int i, const at::Tensor& x) {
  return at::gelu(at::dropout(chain->at<torch::nn::LinearImpl>(i).forward(x), 0.5, /*train=*/true));
}

struct Run {
  at::Tensor loss;
  std::vector<at::Tensor> grads;
  at::Tensor input_grad;
  double next_random = 0;
};

// `order` may use a layer twice.
Run run(torch::nn::Sequential chain, const std::vector<int>& order, bool checkpoints, bool input_requires_grad = true) {
  torch::manual_seed(11);
  auto x = at::linspace(-1, 1, 16).view({2, 8}).set_requires_grad(input_requires_grad);
  auto y = x;
  for (const int i : order) {
    y = checkpoints ? checkpoint([&chain, i](const at::Tensor& in) { return layer(chain, i, in); }, y)
                    : layer(chain, i, y);
  }
  Run result;
  result.loss = y.pow(2).mean();
  result.loss.backward();
  for (const auto& parameter : chain->parameters()) {
    result.grads.push_back(parameter.grad());
  }
  result.input_grad = x.grad();
  result.next_random = at::rand({1}).item<double>();
  return result;
}

TEST(Checkpoint, LossGradientsAndRandomNumbersEqualThoseWithoutIt) {
  for (const bool input_requires_grad : {true, false}) {
    for (const auto& order : {std::vector<int>{0, 1, 2, 3}, std::vector<int>{0, 1, 1, 0}}) {
      const auto plain = run(make_chain(4), order, false, input_requires_grad);
      const auto kept = run(make_chain(4), order, true, input_requires_grad);
      EXPECT_TRUE(at::equal(plain.loss, kept.loss));
      EXPECT_EQ(plain.next_random, kept.next_random);
      if (input_requires_grad) {
        EXPECT_TRUE(at::equal(plain.input_grad, kept.input_grad));
      }
      for (std::size_t i = 0; i < plain.grads.size(); ++i) {
        ASSERT_EQ(plain.grads[i].defined(), kept.grads[i].defined()) << i;
        EXPECT_TRUE(!plain.grads[i].defined() || at::allclose(plain.grads[i], kept.grads[i], 1e-6, 1e-7)) << i;
      }
    }
  }
}

TEST(Checkpoint, ShardedUnitsUsedTwiceAreReducedOnce) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    const auto train = [&](bool checkpoints) {
      auto chain = make_chain(3);
      auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1), .frames = 1, .prefetch = 0});
      auto y = at::full({2, 8}, 0.3 + group->rank());
      for (const int i : {0, 1, 1, 2}) {
        const auto f = [&chain, i](const at::Tensor& in) {
          return at::gelu(chain->at<torch::nn::LinearImpl>(i).forward(in));
        };
        y = checkpoints ? checkpoint(f, y) : f(y);
      }
      y.pow(2).mean().backward();
      EXPECT_EQ(model.stats().reduces, 3);
      EXPECT_EQ(model.residency().held_bytes, 0);
      std::vector<at::Tensor> grads;
      for (const auto& leaf : model.parameters()) {
        grads.push_back(leaf.grad().clone());
      }
      return grads;
    };
    const auto plain = train(false);
    const auto kept = train(true);
    for (std::size_t i = 0; i < plain.size(); ++i) {
      EXPECT_TRUE(at::allclose(plain[i], kept[i], 1e-6, 1e-7)) << i;
    }
  });
}

TEST(Checkpoint, KeepsNothingBetweenInputsAndOutputs) {
  auto chain = make_chain(1);
  std::weak_ptr<int> inside;
  auto x = at::ones({2, 8}).set_requires_grad(true);
  int runs = 0;
  c10::weak_intrusive_ptr<c10::TensorImpl> intermediate((at::ones({1})).getIntrusivePtr());
  const auto y = checkpoint(
      [&](const at::Tensor& in) {
        ++runs;
        const auto middle = chain->forward(in).exp();
        intermediate = c10::weak_intrusive_ptr<c10::TensorImpl>(middle.getIntrusivePtr());
        return middle.exp();
      },
      x);
  EXPECT_TRUE(intermediate.expired());
  EXPECT_EQ(runs, 1);
  y.sum().backward();
  EXPECT_EQ(runs, 2);
}

TEST(Checkpoint, NestsAndTakesSeveralInputsAndOutputs) {
  auto chain = make_chain(2);
  auto plain = make_chain(2);
  auto x = at::ones({2, 8}).set_requires_grad(true);
  const auto index = at::arange(2);
  const auto body = [](torch::nn::Sequential& net, bool nested) {
    return [&net, nested](const std::vector<at::Tensor>& in) -> std::vector<at::Tensor> {
      const auto inner = [&net](const at::Tensor& t) { return net->at<torch::nn::LinearImpl>(0).forward(t).tanh(); };
      const auto h = nested ? checkpoint(inner, in[0]) : inner(in[0]);
      return {net->at<torch::nn::LinearImpl>(1).forward(h).index_select(0, in[1]), in[1] + 1};
    };
  };
  const auto outputs = checkpoint(body(chain, true), {x, index});
  ASSERT_EQ(outputs.size(), 2U);
  EXPECT_EQ(outputs[1].scalar_type(), at::kLong);
  EXPECT_FALSE(outputs[1].requires_grad());
  outputs[0].pow(2).sum().backward();
  auto x2 = at::ones({2, 8}).set_requires_grad(true);
  body(plain, false)({x2, index})[0].pow(2).sum().backward();
  EXPECT_TRUE(at::allclose(x.grad(), x2.grad()));
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(at::allclose(chain->parameters()[i].grad(), plain->parameters()[i].grad()));
  }
}

TEST(Checkpoint, RecomputesUnderTheAutocastOfForward) {
  auto chain = make_chain(1);
  std::vector<at::ScalarType> seen;
  auto x = at::ones({2, 8}).set_requires_grad(true);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto y = checkpoint(
      [&](const at::Tensor& in) {
        auto out = chain->forward(in);
        seen.push_back(out.scalar_type());
        return out;
      },
      x);
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  y.sum().backward();
  EXPECT_THAT(seen, ::testing::ElementsAre(at::kBFloat16, at::kBFloat16));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST(Checkpoint, WithoutGradientsRunsTheFunctionOnceAndKeepsNothing) {
  auto chain = make_chain(1);
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(checkpoint([&](const at::Tensor& in) { return chain->forward(in); }, at::ones({1, 8})).requires_grad());
}

TEST(Checkpoint, BackwardMayRunTwiceWithRetainGraph) {
  auto chain = make_chain(1);
  const auto y = checkpoint([&](const at::Tensor& in) { return chain->forward(in); }, at::ones({1, 8}));
  const auto loss = y.sum();
  loss.backward({}, /*retain_graph=*/true);
  const auto once = chain->parameters()[0].grad().clone();
  loss.backward();
  EXPECT_TRUE(at::equal(chain->parameters()[0].grad(), 2 * once));
}

TEST(Checkpoint, AutogradGradOfAnotherTensorLeavesParametersAlone) {
  auto chain = make_chain(1);
  auto x = at::ones({1, 8}).set_requires_grad(true);
  const auto y = checkpoint([&](const at::Tensor& in) { return chain->forward(in); }, x);
  torch::autograd::grad({y.sum()}, {x});
  EXPECT_FALSE(chain->parameters()[0].grad().defined());
}

TEST(Checkpoint, RefusesWhatItCannotDoRight) {
  auto chain = make_chain(1);
  auto x = at::ones({1, 8}).set_requires_grad(true);
  const auto history = x * 2;
  EXPECT_THAT(
      error_of([&] {
        checkpoint([&](const at::Tensor& in) { return in + history; }, at::ones({1, 8}));
      }),
      HasSubstr("captures a tensor that has history"));
  EXPECT_THAT(error_of([&] { checkpoint(CheckpointFunction{}, {x}); }), HasSubstr("expected a function"));

  int calls = 0;
  const auto changing =
      checkpoint([&](const at::Tensor& in) { return ++calls == 1 ? chain->forward(in) : chain->forward(in).sum(); }, x);
  EXPECT_THAT(error_of([&] { changing.sum().backward(); }), HasSubstr("other shapes or dtypes"));

  const auto y = checkpoint([&](const at::Tensor& in) { return chain->forward(in); }, x);
  EXPECT_THAT(
      error_of([&] { torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true); }),
      HasSubstr("create_graph"));
}

TEST(Checkpoint, AnExceptionInTheRecomputationLeavesAModelThatWorks) {
  auto chain = make_chain(2);
  auto model = fully_shard(chain, {.mesh = comm::Mesh(comm::single()), .wrap = wrap_by_size(1)});
  int calls = 0;
  const auto y = checkpoint(
      [&](const at::Tensor& in) {
        TORCH_CHECK(++calls != 2, "thrown in recomputation");
        return chain->forward(in);
      },
      at::ones({1, 8}));
  EXPECT_THAT(error_of([&] { y.sum().backward(); }), HasSubstr("thrown in recomputation"));
  auto plain = make_chain(2);
  chain->forward(at::ones({1, 8})).sum().backward();
  plain->forward(at::ones({1, 8})).sum().backward();
  EXPECT_TRUE(at::equal(model.parameters()[0].grad(), plain->parameters()[0].grad().flatten()));
  EXPECT_EQ(model.residency().held_bytes, 0);
}

} // namespace
} // namespace ebb::shard
