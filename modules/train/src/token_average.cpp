#include "ebb/train/token_average.h"

#include "shared_numbers.h"

#include <torch/torch.h>

#include <cmath>
#include <map>
#include <unordered_set>
#include <utility>

namespace ebb::train {
namespace {

constexpr double kMostTokens = 9007199254740992.0; // 2^53: sums of doubles are exact up to there

// Checks come after the exchange, on everybody's numbers: a rank that threw before it would leave the others waiting.
double scale_for(
    const char* function, comm::Communicator& world, std::int64_t tokens, std::optional<double> divide_factor) {
  const double factor = divide_factor.value_or(world.size());
  const auto all = shared_numbers(world, {static_cast<double>(tokens), factor});
  double total = 0;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const double theirs = all[rank][0];
    TORCH_CHECK_VALUE(
        theirs >= 0 && theirs <= kMostTokens, "[", function, "] expected a number of tokens of at least 0, got ",
        theirs, " from rank ", rank, "; count the targets that are not padding");
    TORCH_CHECK_VALUE(
        std::isfinite(all[rank][1]) && all[rank][1] > 0 && all[rank][1] == all[0][1], "[", function,
        "] expected the same divide factor above 0 on all ranks, got ", all[0][1], " from rank 0 and ", all[rank][1],
        " from rank ", rank, "; pass what ShardOptions::gradient_divide_factor has, or nothing");
    total += theirs;
  }
  TORCH_CHECK_VALUE(
      total > 0, "[", function, "] expected at least one token in the step, got 0 from all ", world.size(),
      " rank(s); skip this step on every rank, or check the padding mask");
  return factor / total;
}

} // namespace

double token_scale(comm::Communicator& world, std::int64_t tokens, std::optional<double> divide_factor) {
  return scale_for("token_scale", world, tokens, divide_factor);
}

void average_over_tokens(
    const std::vector<at::Tensor>& parameters, std::int64_t tokens, comm::Communicator& world,
    std::optional<double> divide_factor) {
  const double scale = scale_for("average_over_tokens", world, tokens, divide_factor);
  const at::NoGradGuard no_grad;
  std::unordered_set<const c10::TensorImpl*> seen;
  std::map<std::pair<std::string, c10::ScalarType>, std::vector<at::Tensor>> groups; // what foreach runs at once
  for (const auto& parameter : parameters) {
    const auto& gradient = parameter.grad();
    if (gradient.defined() && gradient.numel() > 0 && seen.insert(gradient.unsafeGetTensorImpl()).second) {
      groups[{gradient.device().str(), gradient.scalar_type()}].push_back(gradient);
    }
  }
  for (auto& [kind, gradients] : groups) {
    at::_foreach_mul_(gradients, scale);
  }
}

} // namespace ebb::train
