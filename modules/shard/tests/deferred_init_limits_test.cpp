#include "ebb/shard/deferred_init.h"

#include "support.h"

// What a constructor may not do, what a deferred model is not ready for, and tensors from outside.
namespace ebb::shard {
namespace {

using test::error_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(DeferredInit, AConstructorThatReadsValuesIsRefusedByOperator) {
  const auto refused = [](auto use) {
    return error_of([&] {
      deferred_init([&] {
        use(at::randn({100, 100}));
        return torch::nn::Linear(2, 2);
      });
    });
  };
  EXPECT_THAT(
      refused([](const at::Tensor& x) { (void)x.sum().item<float>(); }),
      AllOf(HasSubstr("aten::_local_scalar_dense"), HasSubstr("build this model directly")));
  EXPECT_THAT(
      refused([](const at::Tensor& x) { (void)x.nonzero(); }),
      AllOf(HasSubstr("aten::nonzero"), HasSubstr("build this model directly")));
  EXPECT_THAT(
      refused([](const at::Tensor& x) { x.data_ptr<float>()[0] = 1; }),
      AllOf(HasSubstr("no values yet"), HasSubstr("called directly")));
  EXPECT_THAT(refused([](const at::Tensor&) { (void)deferred_init([] { return 1; }); }), HasSubstr("one is enough"));
  EXPECT_EQ(at::ones({2}).sum().item<float>(), 2); // the mode is off again
}

TEST(DeferredInit, AModelWithoutValuesIsNotUsedByMistake) {
  auto deferred = deferred_init([] { return torch::nn::Linear(100, 100); });
  EXPECT_THAT(error_of([&] { (void)deferred.model()->forward(at::ones({1, 100})); }), HasSubstr("no values yet"));
  EXPECT_THAT(
      error_of([&] { (void)fully_shard(*deferred.model(), {.mesh = comm::Mesh(comm::single())}); }),
      AllOf(HasSubstr("'weight' has no values yet"), HasSubstr("ebb::deferred_init()")));
  deferred.materialize();
  EXPECT_THAT(error_of([&] { deferred.materialize(); }), HasSubstr("has its values already"));
}

TEST(DeferredInit, AKeptViewOfAParameterIsRefused) {
  at::Tensor kept;
  auto deferred = deferred_init([&] {
    torch::nn::Linear linear(100, 100);
    kept = linear->weight.detach().t();
    return linear;
  });
  EXPECT_THAT(
      error_of([&] { (void)fully_shard(deferred, {.mesh = comm::Mesh(comm::single())}); }),
      AllOf(HasSubstr("'weight' has 2 alias(es)"), HasSubstr("Drop them")));
}

TEST(DeferredInit, TensorsMadeOutsideAreReadAsTheyWere) {
  const auto outside = at::ones({100, 100});
  const auto build = [&] {
    torch::nn::Linear linear(100, 100);
    const at::NoGradGuard no_grad;
    linear->weight.copy_(outside);
    return linear;
  };
  auto first = deferred_init(build);
  auto second = deferred_init(build);
  first.materialize();
  EXPECT_TRUE(at::equal(first.model()->weight, outside));
  outside.add_(1);
  EXPECT_THAT(error_of([&] { second.materialize(); }), AllOf(HasSubstr("aten::copy_"), HasSubstr("was changed since")));
}

TEST(DeferredInit, TensorsMadeOutsideMayBeReadAndThenWritten) {
  auto outside = at::ones({100, 100});
  auto deferred = deferred_init([&] {
    torch::nn::Linear linear(100, 100);
    const at::NoGradGuard no_grad;
    linear->weight.copy_(outside);
    outside.fill_(5);
    return linear;
  });
  deferred.materialize();
  EXPECT_TRUE(at::equal(deferred.model()->weight, at::ones({100, 100})));
  EXPECT_TRUE(at::equal(outside, at::full({100, 100}, 5.0)));
}

TEST(DeferredInit, TensorsMadeOutsideAreWrittenWhenTheModelGetsItsValues) {
  auto outside = at::ones({10});
  const auto build = [&] {
    outside.uniform_(2, 3);
    return torch::nn::Linear(100, 100);
  };
  {
    auto dropped = deferred_init(build);
    EXPECT_THAT(error_of([&] { (void)outside.sum().item<float>(); }), HasSubstr("no values yet"));
  }
  EXPECT_EQ(outside.sum().item<float>(), 10); // never written
  deferred_init(build).materialize();
  EXPECT_GE(outside.min().item<float>(), 2);
}

} // namespace
} // namespace ebb::shard
