#include "ebb/train/token_average.h"

#include "ebb/shard/fully_shard.h"
#include "ebb/shard/replicate.h"
#include "ebb/train/parameter_set.h"
#include "support/complaint.h"
#include "support/spawn_ranks.h"
#include "tiny_training.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ebb::train {
namespace {

using ebb::test::complaint;

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::int64_t kPadding = -100;
constexpr std::int64_t kMicroSteps = 3;
constexpr std::int64_t kVocabulary = 11;
constexpr std::int64_t kLength = 6;

/// Targets that count in each micro-step of each rank. Rank 0 has none in its second.
constexpr std::int64_t kCounts[3][kMicroSteps] = {{1, 0, 6}, {4, 2, 3}, {1, 1, 5}};

torch::nn::Sequential token_model() {
  torch::manual_seed(3);
  torch::nn::Sequential model(
      torch::nn::Embedding(kVocabulary, 5), torch::nn::Tanh(), torch::nn::Linear(5, kVocabulary));
  model->to(at::kDouble);
  return model;
}

struct MicroBatch {
  at::Tensor tokens;
  at::Tensor targets;
};

/// Of all ranks, in rank order.
std::vector<std::vector<MicroBatch>> make_data(int ranks) {
  torch::manual_seed(4);
  std::vector<std::vector<MicroBatch>> data(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    for (const auto count : kCounts[rank]) {
      auto targets = at::randint(kVocabulary, {kLength}, at::kLong);
      targets.slice(0, count).fill_(kPadding);
      data[rank].push_back({at::randint(kVocabulary, {kLength}, at::kLong), targets});
    }
  }
  return data;
}

std::int64_t tokens_of(const std::vector<MicroBatch>& batches) {
  std::int64_t count = 0;
  for (const auto& batch : batches) {
    count += batch.targets.ne(kPadding).sum().item<std::int64_t>();
  }
  return count;
}

at::Tensor summed_loss(torch::nn::Sequential& model, const MicroBatch& batch) {
  return torch::nn::functional::cross_entropy(
      model->forward(batch.tokens), batch.targets,
      torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum).ignore_index(kPadding));
}

/// One step of plain gradient descent, so that parameters show gradients.
void descend(const std::vector<Named>& parameters) {
  const at::NoGradGuard no_grad;
  for (auto [name, parameter] : parameters) {
    parameter.sub_(parameter.grad());
  }
}

std::vector<at::Tensor> values_of(const torch::nn::Sequential& model) {
  std::vector<at::Tensor> values;
  for (const auto& parameter : model->parameters()) {
    values.push_back(parameter.detach().clone());
  }
  return values;
}

double largest_difference(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  TORCH_INTERNAL_ASSERT(a.size() == b.size());
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    largest = std::max(largest, (a[i] - b[i]).abs().max().item<double>());
  }
  return largest;
}

/// What one process makes of all ranks' micro-batches: a single loss, a single division.
std::vector<at::Tensor> reference(const std::vector<std::vector<MicroBatch>>& data) {
  auto model = token_model();
  at::Tensor sum = at::zeros({}, at::kDouble);
  std::int64_t tokens = 0;
  for (const auto& batches : data) {
    tokens += tokens_of(batches);
    for (const auto& batch : batches) {
      sum = sum + summed_loss(model, batch);
    }
  }
  (sum / tokens).backward();
  descend(test::named_tensors(model->named_parameters()));
  return values_of(model);
}

enum class Way { kScaleLosses, kScaleGradients, kMeanOfMeans };
enum class Spread { kSharded, kReplicated };

void train_one_step(
    comm::Communicator& world, torch::nn::Sequential& model, ParameterSet& parameters,
    const std::vector<MicroBatch>& batches, Way way, bool no_sync, std::optional<double> divide_factor = {}) {
  const auto tokens = tokens_of(batches);
  const double scale = way == Way::kScaleLosses ? token_scale(world, tokens, divide_factor) : 1;
  for (std::size_t micro = 0; micro < batches.size(); ++micro) {
    const auto scope = no_sync && micro + 1 < batches.size() ? parameters.no_sync() : nullptr;
    auto loss = summed_loss(model, batches[micro]) * scale;
    if (way == Way::kMeanOfMeans) {
      const auto count = std::max<std::int64_t>(1, tokens_of({batches[micro]}));
      loss = loss / static_cast<double>(count * kMicroSteps);
    }
    loss.backward();
  }
  if (way == Way::kScaleGradients) {
    average_over_tokens(tensors_of(parameters.named()), tokens, world, divide_factor);
  }
  descend(parameters.named());
}

/// Every rank's parameters after the step must differ from `expected` by `difference` says what.
void expect_step(int ranks, Spread spread, Way way, bool no_sync, const std::function<void(double difference)>& check) {
  const auto data = make_data(ranks);
  const auto expected = reference(data);
  std::vector<torch::nn::Sequential> models;
  for (int rank = 0; rank < ranks; ++rank) {
    models.push_back(token_model());
  }
  ebb::test::spawn_ranks(ranks, [&](const std::shared_ptr<comm::Communicator>& world) {
    auto& model = models[world->rank()];
    const auto& batches = data[world->rank()];
    if (spread == Spread::kSharded) {
      auto sharded =
          fully_shard(model, {.mesh = comm::Mesh(world), .wrap = shard::wrap_by_class({"Linear", "Embedding"})});
      train_one_step(*world, model, *sharded_parameters(sharded), batches, way, no_sync);
      const auto whole = sharded.full_parameters({.writeback = false});
      check(largest_difference(values_of(model), expected));
    } else {
      const auto replicated = replicate(model, {.mesh = comm::Mesh(world)});
      train_one_step(*world, model, *replicated_parameters(replicated), batches, way, no_sync);
      check(largest_difference(values_of(model), expected));
    }
  });
}

class TokenAverage : public ::testing::TestWithParam<std::tuple<int, Spread, bool>> {};

TEST_P(TokenAverage, EqualsOneProcessOverAllTokens) {
  const auto [ranks, spread, no_sync] = GetParam();
  for (const auto way : {Way::kScaleLosses, Way::kScaleGradients}) {
    expect_step(ranks, spread, way, no_sync, [&](double difference) {
      EXPECT_LT(difference, 1e-9) << (way == Way::kScaleLosses ? "token_scale" : "average_over_tokens");
    });
  }
}

TEST_P(TokenAverage, IsNotTheMeanOfMicroBatchMeans) {
  const auto [ranks, spread, no_sync] = GetParam();
  expect_step(ranks, spread, Way::kMeanOfMeans, no_sync, [](double difference) { EXPECT_GT(difference, 1e-3); });
}

INSTANTIATE_TEST_SUITE_P(
    All, TokenAverage,
    ::testing::Combine(
        ::testing::Values(1, 2, 3), ::testing::Values(Spread::kSharded, Spread::kReplicated), ::testing::Bool()),
    [](const auto& info) {
      return std::to_string(std::get<0>(info.param)) + "Ranks" +
             (std::get<1>(info.param) == Spread::kSharded ? "Sharded" : "Replicated") +
             (std::get<2>(info.param) ? "NoSync" : "SyncEach");
    });

TEST(TokenAverageDivisor, UndoesWhateverGradientsAreDividedBy) {
  const auto data = make_data(2);
  const auto expected = reference(data);
  for (const auto way : {Way::kScaleLosses, Way::kScaleGradients}) {
    std::vector<torch::nn::Sequential> models{token_model(), token_model()};
    ebb::test::spawn_ranks(2, [&](const std::shared_ptr<comm::Communicator>& world) {
      auto& model = models[world->rank()];
      auto sharded = fully_shard(model, {.mesh = comm::Mesh(world), .gradient_divide_factor = 5.0});
      train_one_step(*world, model, *sharded_parameters(sharded), data[world->rank()], way, true, 5.0);
      const auto whole = sharded.full_parameters({.writeback = false});
      EXPECT_LT(largest_difference(values_of(model), expected), 1e-9);
    });
  }
}

TEST(TokenScale, IsRanksOverTheTokensOfAllRanks) {
  EXPECT_DOUBLE_EQ(token_scale(*comm::single(), 40), 1.0 / 40);
  ebb::test::spawn_ranks(3, [](const std::shared_ptr<comm::Communicator>& world) {
    EXPECT_DOUBLE_EQ(token_scale(*world, world->rank() * 10), 3.0 / 30);
    EXPECT_DOUBLE_EQ(token_scale(*world, world->rank() * 10, 1.0), 1.0 / 30);
  });
}

TEST(TokenScale, RefusesOnEveryRankWhatAnyRankGotWrong) {
  ebb::test::spawn_ranks(2, [](const std::shared_ptr<comm::Communicator>& world) {
    const int rank = world->rank();
    EXPECT_THAT(
        complaint([&] { token_scale(*world, 0); }),
        AllOf(HasSubstr("[token_scale] expected at least one token"), HasSubstr("0 from all 2 rank(s)")));
    EXPECT_THAT(
        complaint([&] { average_over_tokens({}, 0, *world); }),
        HasSubstr("[average_over_tokens] expected at least one token"));
    EXPECT_THAT(complaint([&] { token_scale(*world, rank == 1 ? -3 : 8); }), HasSubstr("got -3 from rank 1"));
    EXPECT_THAT(
        complaint([&] { token_scale(*world, 8, rank == 1 ? 4.0 : 2.0); }),
        AllOf(HasSubstr("same divide factor"), HasSubstr("2 from rank 0 and 4 from rank 1")));
    EXPECT_THAT(complaint([&] { token_scale(*world, 8, 0.0); }), HasSubstr("divide factor above 0"));
  });
}

TEST(AverageOverTokens, ScalesEachGradientThatExistsOnce) {
  const auto with_grad = [](at::ScalarType dtype) {
    auto parameter = at::zeros({3}, dtype).requires_grad_();
    parameter.mutable_grad() = at::full({3}, 8, dtype);
    return parameter;
  };
  const auto a = with_grad(at::kFloat);
  const auto b = with_grad(at::kDouble);
  const auto c = with_grad(at::kBFloat16);
  const auto without = at::zeros({3}).requires_grad_();
  average_over_tokens({a, without, b, c, a}, 4, *comm::single());
  for (const auto& parameter : {a, b, c}) {
    EXPECT_TRUE(parameter.grad().eq(2).all().item<bool>()) << parameter.grad();
  }
  EXPECT_FALSE(without.grad().defined());
}

} // namespace
} // namespace ebb::train
