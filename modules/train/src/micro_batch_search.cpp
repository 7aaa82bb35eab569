#include "ebb/train/micro_batch_search.h"

#include "ebb/base/error.h"
#include "ebb/base/log.h"
#include "shared_numbers.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <new>
#include <string>
#include <string_view>

namespace ebb::train {
namespace {

// LibTorch's CPU allocator throws a plain c10::Error.
bool is_out_of_memory(const std::exception& error) {
  return dynamic_cast<const std::bad_alloc*>(&error) || dynamic_cast<const c10::OutOfMemoryError*>(&error) ||
         std::string_view(error.what()).find("DefaultCPUAllocator: can't allocate memory") != std::string_view::npos;
}

// Each rank judges by its own budget; the first letter of what it shares says how: kFits, kTooLarge or kFailed.
constexpr char kFits = 'f';
constexpr char kTooLarge = 't';
constexpr char kFailed = 'e';

/// Why `micro_batch` does not fit, naming the first rank where it does not; empty where it fits on all.
std::string misfit(
    comm::Communicator& world, const MicroBatchProbe& probe, std::int64_t micro_batch, std::int64_t budget_bytes) {
  std::string mine;
  std::exception_ptr failure;
  try {
    const auto bytes = probe(micro_batch);
    mine = bytes <= budget_bytes ? std::string(1, kFits)
                                 : c10::str(kTooLarge, "needs ", bytes, " bytes of ", budget_bytes);
  } catch (const std::exception& error) {
    if (is_out_of_memory(error)) {
      mine = c10::str(kTooLarge, "ran out of memory");
    } else {
      failure = std::current_exception();
      mine = kFailed + message_of(error).substr(0, 10'000);
    }
  }
  const auto all = world.exchange(mine);
  if (failure) {
    std::rethrow_exception(failure);
  }
  std::string reason;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    TORCH_CHECK(
        all[rank].front() != kFailed, "[largest_micro_batch] the probe of micro-batch ", micro_batch,
        " failed on rank ", rank, ": ", all[rank].substr(1));
    if (all[rank].front() == kTooLarge && reason.empty()) {
      reason = c10::str("rank ", rank, " ", all[rank].substr(1));
    }
  }
  log::debug("micro-batch {} {}", micro_batch, reason.empty() ? "fits" : "does not fit: " + reason);
  return reason;
}

} // namespace

std::int64_t largest_micro_batch(
    comm::Communicator& world, const MicroBatchProbe& probe, const MicroBatchSearch& search) {
  std::int64_t largest = search.largest;
  for (const auto& theirs :
       shared_numbers(world, {static_cast<double>(probe ? search.largest : 0), search.budget_bytes >= 1 ? 1.0 : 0.0})) {
    TORCH_CHECK_VALUE(
        theirs[0] >= 1 && theirs[1] == 1,
        "[largest_micro_batch] expected a probe, and a budget and a largest micro-batch of at least 1, on every rank, "
        "got ",
        probe ? "a probe" : "no probe", ", ", search.budget_bytes, " bytes and ", search.largest, " on this one");
    largest = std::min(largest, static_cast<std::int64_t>(theirs[0]));
  }
  const auto reason = misfit(world, probe, 1, search.budget_bytes);
  TORCH_CHECK_VALUE(
      reason.empty(), "[largest_micro_batch] expected a micro-batch of 1 to fit on every rank, but ", reason,
      "; shard over more ranks, checkpoint activations, shorten the samples or raise the budget");
  const auto fits = [&](std::int64_t size) { return misfit(world, probe, size, search.budget_bytes).empty(); };
  std::int64_t good = 1;
  std::int64_t bad = largest + 1; // stands for the first that is not allowed
  while (good < largest) {
    const auto next = good <= largest / 2 ? 2 * good : largest;
    if (!fits(next)) {
      bad = next;
      break;
    }
    good = next;
  }
  while (bad - good > 1) {
    const auto middle = good + (bad - good) / 2;
    (fits(middle) ? good : bad) = middle;
  }
  return good;
}

} // namespace ebb::train
