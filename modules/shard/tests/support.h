#pragma once

#include "models.h"

#include "ebb/shard/fully_shard.h"
#include "ebb/shard/replicate.h"
#include "support/spawn_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <mutex>
#include <string>

namespace ebb::shard::test {

/// Every module with parameters of its own is a unit.
inline WrapPolicy wrap_everything() {
  return wrap_by_size(1);
}

inline ShardedModel shard_subject(Subject& subject, ShardOptions options) {
  return subject.module ? fully_shard(*subject.module, std::move(options))
                        : fully_shard(*subject.script, std::move(options));
}

inline constexpr std::array kStrategies{Strategy::kFullShard, Strategy::kShardGradOp, Strategy::kNoShard};

/// All ranks of `group`, every module with parameters a unit.
inline ShardOptions over(const std::shared_ptr<comm::Communicator>& group, Strategy strategy = Strategy::kFullShard) {
  return {.mesh = comm::Mesh(group), .strategy = strategy, .wrap = wrap_everything()};
}

/// Runs `body` at one, two and four ranks, as spawn_ranks() does: for what must not depend on their number.
template <class Body>
void at_world_sizes(const Body& body) {
  for (const int ranks : {1, 2, 4}) {
    ebb::test::spawn_ranks(ranks, body);
  }
}

/// The text of the exception that `action` throws, without the backtrace; "" when it throws none.
template <class Action>
std::string error_of(Action action) {
  try {
    action();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

/// Inside a full-parameter scope, or where parameters are whole: bit-equal to the reference's last ones.
inline void expect_parameters(const Subject& subject, const Reference& reference) {
  const auto parameters = subject.parameters();
  ASSERT_EQ(parameters.size(), reference.parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(at::equal(parameters[i].second, reference.parameters[i].second)) << parameters[i].first;
  }
}

/// A chain of `layers` square Linears, each a unit of its own: "0", "1", ...
inline torch::nn::Sequential make_chain(int layers, std::int64_t width = 8) {
  static std::mutex mutex; // ranks are threads and share the default generator
  const std::lock_guard lock(mutex);
  torch::manual_seed(3);
  torch::nn::Sequential chain;
  for (int i = 0; i < layers; ++i) {
    chain->push_back(torch::nn::Linear(width, width));
  }
  return chain;
}

} // namespace ebb::shard::test
