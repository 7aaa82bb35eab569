#include "ebb/train/optimizer.h"

#include "ebb/base/error.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ebb::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string refusal(const std::string& name) {
  try {
    make_optimizer({.optimizer = name}, {torch::zeros({2}, torch::requires_grad())});
  } catch (const c10::ValueError& error) {
    return message_of(error);
  }
  return {};
}

TEST(Optimizer, RefusesLbfgsByNameAndSaysWhy) {
  EXPECT_THAT(refusal("lbfgs"), AllOf(HasSubstr("lbfgs"), HasSubstr("whole parameters"), HasSubstr("adamw")));
  EXPECT_EQ(refusal("LBFGS"), refusal("lbfgs"));
}

TEST(Optimizer, NamesAnUnknownOneAndThoseThereAre) {
  EXPECT_THAT(refusal("adamm"), AllOf(HasSubstr("'adamm'"), HasSubstr("adamw, adam, sgd, rmsprop or adagrad")));
}

class EveryOptimizer : public ::testing::TestWithParam<const char*> {
 protected:
  /// Two parameters, the second without elements, as a shard may be.
  static std::vector<at::Tensor> parameters() {
    return {torch::arange(5, torch::kFloat).requires_grad_(), torch::empty({0}, torch::requires_grad())};
  }
  static void step(Optimizer& optimizer, const std::vector<at::Tensor>& parameters, int i) {
    for (const auto& parameter : parameters) {
      auto tensor = parameter;
      tensor.mutable_grad() = torch::sin(parameter.detach() + i);
    }
    optimizer.step(0.01 / (i + 1));
  }
};

TEST_P(EveryOptimizer, GoesOnBitForBitFromWhatItSaved) {
  const TrainOptions options{.optimizer = GetParam()};
  auto one = parameters();
  auto uninterrupted = make_optimizer(options, one);
  for (int i = 0; i < 3; ++i) {
    step(*uninterrupted, one, i);
  }
  auto two = parameters();
  {
    const torch::NoGradGuard no_grad;
    two[0].copy_(one[0]);
  }
  auto resumed = make_optimizer(options, two);
  resumed->load(uninterrupted->save());
  for (int i = 3; i < 6; ++i) {
    step(*uninterrupted, one, i);
    step(*resumed, two, i);
  }
  EXPECT_TRUE(one[0].equal(two[0])) << one[0] << two[0];
  EXPECT_FALSE(one[0].equal(parameters()[0]));
}

TEST_P(EveryOptimizer, StepsAtTheRateItIsGiven) {
  auto still = parameters();
  auto optimizer = make_optimizer({.optimizer = GetParam(), .weight_decay = 0.0}, still);
  for (auto& tensor : still) {
    tensor.mutable_grad() = torch::ones_like(tensor);
  }
  optimizer->step(0.0);
  EXPECT_TRUE(still[0].equal(parameters()[0]));
  optimizer->step(0.5);
  EXPECT_FALSE(still[0].equal(parameters()[0]));
}

INSTANTIATE_TEST_SUITE_P(
    Names, EveryOptimizer, ::testing::Values("adamw", "adam", "sgd", "rmsprop", "adagrad"),
    [](const auto& info) { return std::string(info.param); });

} // namespace
} // namespace ebb::train
