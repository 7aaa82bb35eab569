#pragma once

#include "ebb/comm/communicator.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace ebb::train {

// Note [Mean over tokens]
// Where sequences are padded, micro-batches differ in how many tokens count. The mean over all tokens of a step is then
// not the mean of the micro-batches' (or ranks') means, which gives the tokens of short micro-batches more weight. It is
// sum of all token losses / number of all tokens. So each micro-batch's loss is the *sum* over its tokens
// (reduction = sum), and what it is divided by is the same everywhere: the tokens of all ranks and micro-steps. ebb's
// gradients are themselves divided by the number of ranks, which has to be undone.
// Source of the bug report: Hugging Face transformers, "num_items_in_batch", 2024.

/// What to multiply each summed loss of a step by, on each of its micro-steps, so that the reduced gradient is that of
/// the mean over all tokens of all ranks and micro-steps: ranks / total tokens. See Note [Mean over tokens].
/// Call it before the step's first backward. Collective; one small exchange.
///
/// @param world   All ranks between which gradients are averaged.
/// @param tokens  That count (are not padding), of this rank over all its micro-steps; at least 0. A rank with none
///                takes part all the same, with a loss of 0.
/// @param divide_factor  ShardOptions::gradient_divide_factor where it is set; the same on all ranks.
/// @throws ValueError on every rank when there are no tokens at all, or for a negative number, naming the rank; when the
///         ranks' divide factors differ or are not above 0.
double token_scale(comm::Communicator& world, std::int64_t tokens, std::optional<double> divide_factor = {});

/// The same for streams whose tokens are known only at the end of the step: backward of summed losses, unscaled, then
/// this once, before clipping and the optimizer. Scales the gradients of `parameters` in place, those that exist, each
/// once even where a tensor is listed twice; one foreach operator for each dtype and device. Collective; one small
/// exchange. Sums of many losses are large: with float16 gradients use token_scale().
///
/// @param parameters  What the optimizer takes: ShardedModel::parameters(), or a replicated or plain model's.
/// Other parameters and errors as token_scale().
void average_over_tokens(
    const std::vector<at::Tensor>& parameters, std::int64_t tokens, comm::Communicator& world,
    std::optional<double> divide_factor = {});

} // namespace ebb::train

namespace ebb {
using train::average_over_tokens;
using train::token_scale;
} // namespace ebb
