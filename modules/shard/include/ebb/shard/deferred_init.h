#pragma once

#include "ebb/shard/fully_shard.h"

#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

namespace ebb::shard {

class Recording;

/// Runs `construct` and returns what it did to tensors, which stay without values. See deferred_init().
std::shared_ptr<Recording> record(const std::function<void()>& construct);

/// Gives every tensor that a recording left without values its values. Once.
void materialize_all(Recording& recording);

/// A model that is built but has no values yet.
template <class Model>
class Deferred {
 public:
  Deferred(Model model, std::shared_ptr<Recording> recording)
      : model_(std::move(model)), recording_(std::move(recording)) {}

  /// The model. Until fully_shard() or materialize() its tensors have shapes, dtypes and their device, and no memory:
  /// operators and pointers that read them throw.
  Model& model() {
    return model_;
  }
  const std::shared_ptr<Recording>& recording() const {
    return recording_;
  }
  /// Gives every tensor its values, on this rank, unsharded. Once.
  Model& materialize() {
    materialize_all(*recording_);
    return model_;
  }

 private:
  Model model_;
  std::shared_ptr<Recording> recording_;
};

/// Builds a model without memory for it, however large (FSDP paper, section 3.1): what the constructor does to tensors is
/// recorded, and done by fully_shard() or Deferred::materialize(), one tensor at a time in the constructor's order, so
/// that random numbers fall as they would have. `construct` returns a module holder, a pointer to a module, or anything
/// else with tensors in it.
///
///   auto deferred = ebb::deferred_init([&] { return GPT(config); });
///   auto sharded = ebb::fully_shard(deferred, {.mesh = mesh, .wrap = wrap_by_class({"Block"})});
///   deferred.model()->forward(x);
///
/// Values are bit-equal to those of a model that is built directly after the same torch::manual_seed(), at any number of
/// ranks and in any units; the generator ends where it would have, unless it was seeded or drawn from in between.
/// fully_shard() holds, at most, this rank's shards and the tensor being initialised with what it is computed from; it
/// sends no values: with ShardOptions::sync_module_states every rank draws rank 0's random numbers. What a constructor
/// reads from elsewhere, a file say, must be the same on every rank. Constants of up to 4,096 elements have memory at
/// once, as code fills such tensors by pointer.
///
/// @throws NotImplementedError for a constructor that reads values which are drawn or computed (item(), printing), or
///         uses an operator whose result's shape cannot be known without values; names the operator. Build such a model
///         directly.
template <class Construct>
auto deferred_init(Construct construct) {
  using Model = std::invoke_result_t<Construct>;
  std::optional<Model> model;
  auto recording = record([&] { model.emplace(construct()); });
  return Deferred<Model>(std::move(*model), std::move(recording));
}

/// Shards a model whose values a recording holds; see deferred_init(). Collective.
ShardedModel fully_shard(torch::nn::Module& model, Recording& recording, ShardOptions options);

/// Gives the model its values unit by unit while sharding it. Collective; otherwise as fully_shard() of a model.
template <class Model>
ShardedModel fully_shard(Deferred<Model>& deferred, ShardOptions options) {
  if constexpr (requires { *deferred.model(); }) {
    return fully_shard(static_cast<torch::nn::Module&>(*deferred.model()), *deferred.recording(), std::move(options));
  } else {
    return fully_shard(static_cast<torch::nn::Module&>(deferred.model()), *deferred.recording(), std::move(options));
  }
}

} // namespace ebb::shard

namespace ebb {
using shard::Deferred;
using shard::deferred_init;
using shard::fully_shard; // again: the first one, in fully_shard.h, came before the overload above
} // namespace ebb
