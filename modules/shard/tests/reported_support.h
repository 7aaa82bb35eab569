#pragma once

#include "support.h"

#include <map>
#include <mutex>
#include <string>
#include <vector>

// What the tests in reported_*_test.cpp share. Each of their cases is a behaviour that has hurt users of other
// implementations; the comment above it names the reports.
namespace ebb::shard::test {

using Group = std::shared_ptr<comm::Communicator>;

/// What `make` returns, from the same seed on every rank: ranks are threads and share the default generator.
template <class Make>
auto built(Make make, std::uint64_t seed = 3) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(seed);
  return make();
}

/// Another batch for each rank and step.
inline at::Tensor batch(int rank, int step = 0, std::int64_t width = 8) {
  return at::linspace(-1, 1, 2 * width).view({2, width}) * (1 + rank) + 0.1 * step;
}

/// One layer of make_chain().
inline torch::nn::LinearImpl& layer(torch::nn::Sequential chain, std::size_t i) {
  return chain->at<torch::nn::LinearImpl>(i);
}

/// The gradients of one unsharded process: those of `loss_of(rank)` summed in rank order and divided once.
template <class Loss>
void backward_of_all_ranks(torch::nn::Module& plain, int ranks, Loss loss_of) {
  for (int rank = 0; rank < ranks; ++rank) {
    loss_of(rank).backward();
  }
  for (auto& parameter : plain.parameters()) {
    if (parameter.grad().defined()) {
      parameter.mutable_grad().div_(ranks);
    }
  }
}

/// Each leaf's gradient is its slice of that in `plain`, and undefined where that is. `tolerance` 0: bit for bit.
inline void expect_gradients(const ShardedModel& model, const torch::nn::Module& plain, double tolerance = 0) {
  std::map<std::string, at::Tensor> expected;
  for (const auto& parameter : plain.named_parameters()) {
    expected[parameter.key()] = parameter.value().grad();
  }
  const auto layout = model.layout();
  const auto leaves = model.named_parameters();
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const auto& [name, leaf] = leaves[i];
    const auto& whole = expected.at(name);
    ASSERT_EQ(leaf.grad().defined(), whole.defined()) << name;
    if (whole.defined()) {
      const auto begin = layout[i].slices.empty() ? 0 : layout[i].slices[0].begin;
      const auto& order = layout[i].dim_order;
      const auto flat = order.empty() ? whole.flatten() : whole.permute(order).flatten();
      const auto part = flat.narrow(0, begin, leaf.numel());
      EXPECT_TRUE(tolerance == 0 ? at::equal(leaf.grad(), part) : at::allclose(leaf.grad(), part, tolerance, tolerance))
          << name << "\n"
          << leaf.grad() - part;
    }
  }
}

/// The values of two models whose parameters are whole.
inline void expect_values(const torch::nn::Module& module, const torch::nn::Module& plain, double tolerance = 0) {
  const auto values = module.named_parameters();
  const auto expected = plain.named_parameters();
  ASSERT_EQ(values.size(), expected.size());
  for (const auto& parameter : expected) {
    const auto& value = values[parameter.key()];
    EXPECT_TRUE(
        tolerance == 0 ? at::equal(value, parameter.value())
                       : at::allclose(value, parameter.value(), tolerance, tolerance))
        << parameter.key();
  }
}

/// Gathers the model to compare it. Collective.
inline void expect_parameters(
    ShardedModel& model, const torch::nn::Module& module, const torch::nn::Module& plain, double tolerance = 0) {
  auto scope = model.full_parameters({.writeback = false});
  expect_values(module, plain, tolerance);
  scope.close();
}

inline std::int64_t bytes_sent(const comm::Communicator& group, comm::Op op) {
  return group.traffic().bytes_sent[static_cast<std::size_t>(op)];
}

} // namespace ebb::shard::test
