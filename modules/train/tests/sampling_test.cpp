#include "ebb/train/sampling.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <map>

namespace ebb::train {
namespace {

/// Logits that prefer the byte after the last one, and by less the one after that.
at::Tensor count_up(const at::Tensor& tokens_BT) {
  auto logits_BTV = torch::full({1, tokens_BT.size(1), 300}, -5.0f);
  for (std::int64_t t = 0; t < tokens_BT.size(1); ++t) {
    const auto next = tokens_BT[0][t].item<std::int64_t>() + 1;
    logits_BTV[0][t][next] = 3.0f;
    logits_BTV[0][t][next + 1] = 2.0f;
    logits_BTV[0][t][280] = 9.0f; // no byte: never sampled
  }
  return logits_BTV;
}

TEST(Sampling, TakesTheLikeliestByteAtTemperatureZero) {
  EXPECT_EQ(sample_text(count_up, {.length = 5, .temperature = 0, .prompt = "ab"}, Rng(1), at::kCPU), "cdefg");
}

TEST(Sampling, ShowsTheModelAtMostItsContext) {
  std::int64_t longest = 0;
  const auto watch = [&](const at::Tensor& tokens_BT) {
    EXPECT_EQ(tokens_BT.dtype(), torch::kLong);
    EXPECT_FALSE(at::GradMode::is_enabled());
    longest = std::max(longest, tokens_BT.size(1));
    return count_up(tokens_BT);
  };
  EXPECT_EQ(
      sample_text(watch, {.length = 6, .context = 3, .temperature = 0, .prompt = "a"}, Rng(1), at::kCPU), "bcdefg");
  EXPECT_EQ(longest, 3);
}

TEST(Sampling, DrawsFromTheSoftmaxOfTheTopK) {
  const auto fixed = [](const at::Tensor& tokens_BT) {
    auto logits_BTV = torch::full({1, tokens_BT.size(1), 256}, 0.0f);
    logits_BTV.index_put_({0, -1, 'a'}, 5.0f);
    logits_BTV.index_put_({0, -1, 'b'}, 4.0f);
    return logits_BTV;
  };
  const auto shares = [&](double temperature) {
    std::map<char, double> counts;
    const auto text = sample_text(
        fixed, {.length = 2000, .context = 1, .temperature = temperature, .top_k = 2, .prompt = "x"}, Rng(3), at::kCPU);
    for (const char c : text) {
      counts[c] += 1.0 / 2000;
    }
    return counts;
  };
  auto warm = shares(1.0);
  EXPECT_EQ(warm.size(), 2u); // 254 other bytes have 45 % of the softmax, and none is drawn
  EXPECT_NEAR(warm['a'], 1 / (1 + std::exp(-1.0)), 0.04);
  auto cold = shares(0.25);
  EXPECT_NEAR(cold['a'], 1 / (1 + std::exp(-4.0)), 0.02);
}

TEST(Sampling, DependsOnTheRngAlone) {
  const auto draw = [](std::uint64_t seed) {
    return sample_text(count_up, {.length = 40, .temperature = 1.0, .prompt = " "}, Rng(seed), at::kCPU);
  };
  EXPECT_EQ(draw(1), draw(1));
  EXPECT_NE(draw(1), draw(2));
}

TEST(Sampling, SurvivesLogitsThatAreNotNumbers) {
  const auto broken = [](const at::Tensor& tokens_BT) {
    return torch::full({1, tokens_BT.size(1), 256}, std::nan(""), torch::kFloat);
  };
  EXPECT_EQ(sample_text(broken, {.length = 3}, Rng(1), at::kCPU).size(), 3u);
}

TEST(Sampling, RefusesAnEmptyPromptAndASmallVocabulary) {
  EXPECT_THROW(sample_text(count_up, {.prompt = ""}, Rng(1), at::kCPU), c10::ValueError);
  const auto small = [](const at::Tensor& tokens_BT) { return torch::zeros({1, tokens_BT.size(1), 100}); };
  EXPECT_THROW(sample_text(small, {}, Rng(1), at::kCPU), c10::ValueError);
}

TEST(Printable, KeepsTextAndNewlinesAndNothingATerminalObeys) {
  EXPECT_EQ(printable("Emma\n said: \x1b[31m\x07\xc3\xa9\r\t"), "Emma\n said: ?[31m?????");
}

} // namespace
} // namespace ebb::train
