#include "ebb/comm/dry_group.h"
#include "ebb/shard/step_profiler.h"

#include "support.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <tuple>

namespace ebb::shard {
namespace {

using test::error_of;
using test::Gpt;
using test::wrap_everything;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Collective = std::tuple<std::string, std::string, std::int64_t>; // kind, unit, bytes

std::vector<Collective> collectives_of(const std::vector<comm::CollectiveRecord>& records) {
  std::vector<Collective> result;
  for (const auto& record : records) {
    result.emplace_back(comm::name_of(record.op), record.unit, record.bytes);
  }
  return result;
}

struct Step {
  StepProfile profile;
  std::vector<Collective> collectives;
};

/// The second step of a GPT, whose code is the same in earnest and dry.
Step second_step(StepProfiler::Mode mode, const std::shared_ptr<comm::Communicator>& group, ShardOptions options) {
  static std::mutex mutex; // ranks are threads and share the default generator
  std::optional<Gpt> made;
  StepProfiler profiler(mode);
  {
    const std::lock_guard lock(mutex);
    made.emplace(256, 64, 128, 4, 3);
  }
  auto& gpt = *made;
  options.mesh = comm::Mesh(group);
  auto model = fully_shard(gpt, std::move(options));
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(1e-3));
  std::uint64_t first_of_second = 0;
  for (int step = 0; step < 2; ++step) {
    profiler.begin();
    if (mode == StepProfiler::Mode::kDry) {
      comm::clear_dry_collectives(*group);
    } else if (const auto before = comm::flight_record(*group); !before.empty()) {
      first_of_second = before.back().number;
    }
    const auto tokens = at::arange(2 * 64).view({2, 64});
    const auto logits = gpt->forward(tokens);
    torch::nn::functional::cross_entropy(logits.flatten(0, 1), (tokens + 1).flatten().remainder(256)).backward();
    model.clip_grad_norm_(1e9);
    optimizer.step();
    optimizer.zero_grad();
  }
  Step result{profiler.profile(), {}};
  if (mode == StepProfiler::Mode::kDry) {
    result.collectives = collectives_of(comm::dry_collectives(*group));
  } else {
    auto records = comm::flight_record(*group);
    std::erase_if(records, [&](const auto& record) { return record.number <= first_of_second; });
    result.collectives = collectives_of(records);
  }
  return result;
}

class DryRun : public ::testing::TestWithParam<const char*> {};

ShardOptions options_of(const std::string& name) {
  ShardOptions options{.mesh = comm::Mesh(comm::single()), .wrap = wrap_by_class({"Block"})};
  if (name == "grad_op") {
    options.strategy = Strategy::kShardGradOp;
  } else if (name == "no_shard") {
    options.strategy = Strategy::kNoShard;
  } else if (name == "bf16") {
    options.mixed_precision = mixed_precision("bf16");
  } else if (name == "everything") {
    options.wrap = wrap_everything();
  }
  return options;
}

TEST_P(DryRun, IsWhatFourRanksDoInEarnest) {
  constexpr int kRanks = 4;
  std::mutex mutex;
  std::optional<Step> real;
  ebb::test::spawn_ranks(kRanks, [&](const auto& group) {
    const auto step = second_step(StepProfiler::Mode::kReal, group, options_of(GetParam()));
    const std::lock_guard lock(mutex);
    if (group->rank() == 0) {
      real = step;
    }
  });
  const auto dry = second_step(StepProfiler::Mode::kDry, comm::dry_group(0, kRanks), options_of(GetParam()));
  EXPECT_EQ(dry.collectives, real->collectives);
  EXPECT_GT(dry.collectives.size(), 4U);
  EXPECT_EQ(dry.profile.flops, real->profile.flops);
  EXPECT_EQ(dry.profile.operators, real->profile.operators);
  const auto peak = static_cast<double>(real->profile.peak_live_bytes);
  EXPECT_NEAR(static_cast<double>(dry.profile.peak_live_bytes), peak, 0.05 * peak);
}

INSTANTIATE_TEST_SUITE_P(
    All, DryRun, ::testing::Values("full_shard", "grad_op", "no_shard", "bf16", "everything"),
    [](const auto& info) { return std::string(info.param); });

TEST(DryRunOfMany, CountsFlopsByFormulaAndBytesByTheNumberOfRanks) {
  constexpr int kRanks = 512;
  const auto group = comm::dry_group(7, kRanks);
  const auto step = second_step(StepProfiler::Mode::kDry, group, options_of("full_shard"));
  // Forward and backward multiply each weight matrix three times with each of 2 x 64 tokens; head and embedding are one.
  const std::int64_t matrices = 3 * 12 * 128 * 128 + 256 * 128;
  const std::int64_t attention = 3 * (4 + 10) * 2 * 64 * 64 * 128;
  EXPECT_EQ(step.profile.flops, 6 * 2 * 64 * matrices + attention);
  const std::int64_t block = 4 * (12 * 128 * 128 + 13 * 128);
  std::int64_t largest = 0; // of its dtypes, which are gathered one by one
  for (const auto& [kind, unit, bytes] : step.collectives) {
    if (kind == "all_gather" && unit == "blocks.1") {
      largest = std::max(largest, bytes);
    }
  }
  EXPECT_GE(largest, block / kRanks);
  EXPECT_LE(largest, block / kRanks + 128); // padding
}

TEST(DryRunOfMany, AModelOfTensOfBillionsTakesNoMemory) {
  const auto group = comm::dry_group(0, 1024);
  const StepProfiler profiler(StepProfiler::Mode::kDry);
  torch::nn::Sequential model;
  for (int i = 0; i < 40; ++i) {
    model->push_back(torch::nn::Linear(torch::nn::LinearOptions(32768, 32768).bias(false)));
  }
  auto sharded = fully_shard(model, {.mesh = comm::Mesh(group)});
  model->forward(at::ones({64, 32768})).sum().backward();
  const std::int64_t parameters = std::int64_t{40} * 32768 * 32768;
  EXPECT_EQ(sharded.num_parameters(), parameters);
  EXPECT_EQ(sharded.shard_bytes(), 4 * parameters / 1024);
  // The input needs no gradient, which saves the first layer one product.
  EXPECT_EQ(profiler.profile().flops, 6 * 64 * parameters - 2 * 64 * std::int64_t{32768} * 32768);
}

TEST(DryRunOfMany, FollowsLayersWithoutMetaKernels) {
  const auto run = [](StepProfiler::Mode mode) {
    const StepProfiler profiler(mode);
    torch::manual_seed(3);
    torch::nn::Sequential model(
        torch::nn::Conv2d(torch::nn::Conv2dOptions(8, 16, 3).padding(1)), torch::nn::BatchNorm2d(16),
        torch::nn::Functional(torch::relu), torch::nn::ConvTranspose2d(torch::nn::ConvTranspose2dOptions(16, 8, 2)),
        torch::nn::GroupNorm(2, 8), torch::nn::Dropout(0.1), torch::nn::Flatten(), torch::nn::Linear(8 * 33 * 33, 10));
    const auto group = mode == StepProfiler::Mode::kDry ? comm::dry_group(0, 1) : comm::single();
    auto sharded = fully_shard(model, {.mesh = comm::Mesh(group)});
    const auto y = model->forward(at::ones({2, 8, 32, 32}));
    y.sum().backward();
    auto profile = profiler.profile();
    EXPECT_EQ(y.sizes(), at::IntArrayRef({2, 10}));
    return profile;
  };
  const auto real = run(StepProfiler::Mode::kReal);
  const auto dry = run(StepProfiler::Mode::kDry);
  EXPECT_EQ(dry.flops, real.flops);
  const std::int64_t convolution = 2 * 2 * 16 * 32 * 32 * 8 * 9;
  const std::int64_t transposed = 2 * 2 * 16 * 32 * 32 * 8 * 4;
  const std::int64_t linear = 2 * 2 * 8 * 33 * 33 * 10;
  EXPECT_EQ(dry.flops, 2 * convolution + 3 * transposed + 3 * linear); // the input needs no gradient
}

TEST(DryRunOfMany, NamesWhatNeedsValues) {
  const StepProfiler profiler(StepProfiler::Mode::kDry);
  const auto x = at::randn({100, 100});
  EXPECT_EQ(x.sum().item<float>(), 0);
  EXPECT_THAT(error_of([&] { (void)x.nonzero(); }), AllOf(HasSubstr("aten::nonzero"), HasSubstr("in earnest")));
  EXPECT_THAT(error_of([&] { (void)x.data_ptr<float>(); }), HasSubstr("by pointer in a dry run"));
  EXPECT_THAT(
      error_of([] { const StepProfiler second(StepProfiler::Mode::kReal); }), HasSubstr("has a profiler already"));
  EXPECT_EQ(at::arange(10'000).sum().item<std::int64_t>(), 49'995'000); // indices are real
}

TEST(DryRunOfMany, LeavesTheThreadAsItWas) {
  {
    const StepProfiler profiler(StepProfiler::Mode::kDry);
    (void)at::randn({100, 100});
  }
  EXPECT_EQ(at::ones({100, 100}).sum().item<float>(), 10'000);
}

} // namespace
} // namespace ebb::shard
