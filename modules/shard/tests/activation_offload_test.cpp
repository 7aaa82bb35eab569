#include "ebb/shard/activation_offload.h"
#include "ebb/shard/checkpoint.h"

#include "support.h"

#include <atomic>
#include <chrono>
#include <future>
#include <random>
#include <thread>

namespace ebb::shard {
namespace {

using test::error_of;
using test::make_chain;
using ::testing::HasSubstr;

constexpr std::int64_t kWidth = 8;
constexpr std::int64_t kInputBytes = 4 * kWidth * 4;

std::shared_ptr<ActivationOffload> to_file(std::function<void()> before_copy = {}) {
  return std::make_shared<ActivationOffload>(ActivationOffloadOptions{
      .policy = {.tier = OffloadTier::kFile, .before_copy = std::move(before_copy)}, .min_bytes = 1});
}

// Layers in the order given, each a checkpoint. `watch` sees each layer's input.
at::Tensor checkpointed(
    torch::nn::Sequential& chain, const std::vector<int>& order, at::Tensor x,
    const std::shared_ptr<ActivationOffload>& offload, const std::function<void(const at::Tensor&)>& watch = {}) {
  for (const int i : order) {
    if (watch) {
      watch(x);
    }
    x = checkpoint_with(
        {.offload = offload},
        [&chain, i](const at::Tensor& in) { return at::gelu(chain->at<torch::nn::LinearImpl>(i).forward(in)); }, x);
  }
  return x;
}

at::Tensor input_of(int rank = 0) {
  return at::linspace(-1, 1, 4 * kWidth).view({4, kWidth}) * (1 + rank);
}

TEST(ActivationOffload, GradientsAreThoseWithoutItHoweverLateCopiesAre) {
  ebb::test::spawn_ranks(2, [](const auto& group) {
    const auto train = [&](const std::shared_ptr<ActivationOffload>& offload) {
      auto chain = make_chain(3);
      auto model = fully_shard(chain, {.mesh = comm::Mesh(group), .wrap = wrap_by_size(1), .frames = 1, .prefetch = 0});
      std::vector<at::Tensor> grads;
      for (int step = 0; step < 3; ++step) {
        auto x = input_of(group->rank() + step).set_requires_grad(true);
        checkpointed(chain, {0, 1, 1, 2, 0}, x, offload).pow(2).mean().backward();
        grads.push_back(x.grad());
      }
      for (const auto& leaf : model.parameters()) {
        grads.push_back(leaf.grad().clone());
      }
      return grads;
    };
    std::minstd_rand random(group->rank() + 1);
    const auto offload =
        to_file([random]() mutable { std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000)); });
    const auto plain = train(nullptr);
    const auto offloaded = train(offload);
    for (std::size_t i = 0; i < plain.size(); ++i) {
      EXPECT_TRUE(at::equal(plain[i], offloaded[i])) << i;
    }
    EXPECT_EQ(offload->stats().stored_bytes, 3 * 5 * kInputBytes);
    EXPECT_EQ(offload->stats().live_bytes, 0);
  });
}

TEST(ActivationOffload, InputsLeaveMemoryAndComeBackOneAhead) {
  auto chain = make_chain(6);
  const auto offload = to_file();
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> inputs;
  const auto y = checkpointed(chain, {0, 1, 2, 3, 4, 5}, input_of(), offload, [&](const at::Tensor& x) {
    inputs.emplace_back(x.storage().getWeakStorageImpl());
  });
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    EXPECT_EQ(inputs[i].expired(), i < 5) << i; // the last is still on its way
  }
  EXPECT_EQ(offload->stats().stored_bytes, 6 * kInputBytes);
  EXPECT_EQ(offload->stats().live_bytes, 6 * kInputBytes);
  EXPECT_EQ(offload->stats().fetched, 0);
  y.sum().backward();
  EXPECT_EQ(offload->stats().fetched, 5); // the last of forward was still there
  EXPECT_EQ(offload->stats().fetched_ahead, 5);
  EXPECT_EQ(offload->stats().fetched_bytes, 5 * kInputBytes);
  EXPECT_EQ(offload->stats().live_bytes, 0);
}

TEST(ActivationOffload, BackwardMayRunTwiceWithRetainGraphAndNotWithout) {
  auto chain = make_chain(3);
  const auto offload = to_file();
  const auto loss = checkpointed(chain, {0, 1, 2}, input_of(), offload).sum();
  loss.backward({}, /*retain_graph=*/true);
  const auto once = chain->parameters()[0].grad().clone();
  EXPECT_EQ(offload->stats().live_bytes, 3 * kInputBytes);
  loss.backward();
  EXPECT_TRUE(at::equal(chain->parameters()[0].grad(), 2 * once));
  EXPECT_EQ(offload->stats().live_bytes, 0);
  EXPECT_THAT(error_of([&] { loss.backward(); }), HasSubstr("second time"));
}

TEST(ActivationOffload, AGraphThatIsDroppedLeavesNothingInTheTier) {
  auto chain = make_chain(3);
  const auto offload = to_file();
  checkpointed(chain, {0, 1, 2}, input_of(), offload);
  EXPECT_EQ(offload->stats().stored_bytes, 3 * kInputBytes);
  EXPECT_EQ(offload->stats().live_bytes, 0);
}

TEST(ActivationOffload, AnInputWrittenToUnderItsCopyIsRefusedAndOneWrittenLaterIsNot) {
  std::promise<void> written;
  const auto may_copy = written.get_future().share();
  auto chain = make_chain(2);
  const auto offload = to_file([may_copy] { may_copy.wait(); });
  auto x = input_of();
  const auto first = checkpointed(chain, {0}, x, offload);
  x.add_(1);
  written.set_value();
  EXPECT_THAT(
      error_of([&] { first.sum().backward(); }),
      HasSubstr("an input [4, 8] of a checkpointed function was written to"));

  const auto after = to_file();
  auto early = input_of();
  const auto y = checkpointed(chain, {0}, early, after);
  checkpointed(chain, {1}, input_of(), after); // the copy of `early` has ended when the next begins
  early.zero_();
  y.sum().backward();
  auto plain = make_chain(2);
  at::gelu(plain->at<torch::nn::LinearImpl>(0).forward(input_of())).sum().backward();
  EXPECT_TRUE(at::allclose(chain->parameters()[0].grad(), plain->parameters()[0].grad(), 1e-6, 1e-7));
}

TEST(ActivationOffload, SmallInputsStayAndStridedOnesComeBackAsTheyWere) {
  const auto offload = std::make_shared<ActivationOffload>(
      ActivationOffloadOptions{.policy = {.tier = OffloadTier::kFile}, .min_bytes = 100});
  std::vector<std::vector<std::int64_t>> strides;
  const auto record = [&](const std::vector<at::Tensor>& in) -> std::vector<at::Tensor> {
    strides.push_back(in[0].strides().vec());
    EXPECT_EQ(in[1].item<double>(), 3.0);
    return {in[0] * in[1]};
  };
  const auto image = at::randn({2, 3, 4, 4}).contiguous(at::MemoryFormat::ChannelsLast).set_requires_grad(true);
  const auto y = checkpoint(record, {image, at::full({1}, 3.0)}, {.offload = offload});
  checkpoint(record, {image, at::full({1}, 3.0)}, {.offload = offload}); // the first has left
  EXPECT_EQ(offload->stats().stored_bytes, 2 * static_cast<std::int64_t>(image.nbytes()));
  y[0].sum().backward();
  ASSERT_EQ(strides.size(), 3U);
  EXPECT_EQ(strides[0], strides[2]);
  EXPECT_TRUE(at::equal(image.grad(), at::full_like(image, 3)));
}

TEST(ActivationOffload, ACopyThatFailsIsToldAndTheNextStepWorks) {
  std::atomic<int> copies{0};
  auto chain = make_chain(2);
  const auto offload = to_file([&] { TORCH_CHECK(++copies != 1, "the disk is gone"); });
  EXPECT_THAT(error_of([&] { checkpointed(chain, {0, 1}, input_of(), offload); }), HasSubstr("the disk is gone"));
  checkpointed(chain, {0, 1}, input_of(), offload).sum().backward();
  auto plain = make_chain(2);
  checkpointed(plain, {0, 1}, input_of(), nullptr).sum().backward();
  EXPECT_TRUE(at::equal(chain->parameters()[0].grad(), plain->parameters()[0].grad()));
  EXPECT_EQ(offload->stats().live_bytes, 0);
}

TEST(ActivationOffload, RefusesATierThatTheDeviceExcludes) {
  auto chain = make_chain(1);
  const auto host = std::make_shared<ActivationOffload>(ActivationOffloadOptions{.min_bytes = 1});
  EXPECT_THAT(
      error_of([&] { checkpointed(chain, {0}, input_of(), host); }),
      HasSubstr("[ActivationOffload] offload: expected tensors on an accelerator for OffloadTier::kHost"));
  EXPECT_THAT(error_of([] { ActivationOffload({.min_bytes = -1}); }), HasSubstr("min_bytes of at least 0, got -1"));
}

} // namespace
} // namespace ebb::shard
