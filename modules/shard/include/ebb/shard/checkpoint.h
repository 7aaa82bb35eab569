#pragma once

#include "ebb/shard/activation_offload.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace ebb::shard {

/// How checkpoint() treats what it keeps.
struct CheckpointOptions {
  /// Off: calls the function as it is, activations kept. What a policy switches.
  bool enabled = true;
  /// Put the random number generators of the CPU and of the inputs' devices back for the recomputation, so that dropout
  /// draws the same numbers again. Off saves a copy of the state (5 kB on CPU) where nothing is random.
  bool preserve_rng_state = true;
  /// Where the inputs are between forward and backward; nullptr keeps them where they are.
  std::shared_ptr<ActivationOffload> offload = nullptr;
};

using CheckpointFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// Activation checkpointing (Chen et al. 2016): runs `function` without keeping what lies between its inputs and its
/// outputs, and runs it again in backward. Parameters that it captures, sharded or not, are found by themselves and get
/// their gradients once per backward, in the outer backward: a sharded unit used twice is still reduced once.
///
/// @param function  Any code whose result depends on `inputs`, on leaf tensors and on random numbers alone; called again
///                  in backward, under the same autocast state and, by default, with the same random numbers.
/// @param inputs    Tensors of any kind; those that require a gradient get one. A tensor with history must be passed
///                  here and not captured.
/// @return The outputs; gradients flow through those of floating dtype.
/// @throws ValueError for a captured tensor that has history, where the recomputation gives other shapes or dtypes than
///         the first run, and for an offloaded input that was written to while it was copied; NotImplementedError under create_graph.
/// Cost: one more forward of `function` in backward. Not collective by itself; what it gathers is.
std::vector<at::Tensor> checkpoint(
    CheckpointFunction function, std::vector<at::Tensor> inputs, const CheckpointOptions& options = {});

/// The same for a function from tensors to one tensor: `checkpoint_with({.offload = offload}, [&](at::Tensor x) {
/// return block->forward(x); }, x)`.
template <class Function, class... Tensors>
  requires(
      std::is_invocable_r_v<at::Tensor, Function, const Tensors&...> &&
      (std::is_convertible_v<Tensors, at::Tensor> && ...))
at::Tensor checkpoint_with(const CheckpointOptions& options, Function function, const Tensors&... inputs) {
  return [&]<std::size_t... I>(std::index_sequence<I...>) {
    CheckpointFunction call = [function = std::move(function)](const std::vector<at::Tensor>& tensors) mutable {
      return std::vector<at::Tensor>{function(tensors[I]...)};
    };
    return checkpoint(std::move(call), std::vector<at::Tensor>{inputs...}, options).front();
  }
  (std::index_sequence_for<Tensors...>{});
}

/// With the default options: `checkpoint([&](at::Tensor x) { return block->forward(x); }, x)`.
template <class Function, class... Tensors>
  requires(
      std::is_invocable_r_v<at::Tensor, Function, const Tensors&...> &&
      (std::is_convertible_v<Tensors, at::Tensor> && ...))
at::Tensor checkpoint(Function function, const Tensors&... inputs) {
  return checkpoint_with(CheckpointOptions{}, std::move(function), inputs...);
}

} // namespace ebb::shard

namespace ebb {
using shard::checkpoint;
using shard::checkpoint_with;
} // namespace ebb
