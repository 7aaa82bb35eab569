#include "ebb/data/window_order.h"

#include "ebb/base/error.h"
#include "ebb/base/rng.h"

#include <torch/torch.h>

#include <string>

namespace ebb::data {

Batch make_batch(const ByteCorpus& corpus, Split split, const std::vector<std::int64_t>& indices) {
  const auto num_sequences = static_cast<std::int64_t>(indices.size());
  const auto context = corpus.options().context;
  Batch batch{at::empty({num_sequences, context}, at::kLong), at::empty({num_sequences, context}, at::kLong)};
  auto* tokens = batch.tokens_BT.mutable_data_ptr<std::int64_t>();
  auto* targets = batch.targets_BT.mutable_data_ptr<std::int64_t>();
  for (const auto index : indices) {
    const auto bytes = corpus.window(split, index);
    for (std::int64_t t = 0; t < context; ++t) {
      *tokens++ = bytes[t];
      *targets++ = bytes[t + 1];
    }
  }
  return batch;
}

WindowOrder::WindowOrder(std::shared_ptr<const ByteCorpus> corpus, std::uint64_t seed)
    : corpus_(std::move(corpus)), seed_(seed) {
  TORCH_CHECK_VALUE(corpus_, "[WindowOrder] expected a corpus, got none");
  open_epoch(0);
}

std::vector<std::int64_t> WindowOrder::next(std::int64_t per_rank, int rank, int world_size) {
  TORCH_CHECK_VALUE(
      per_rank >= 1 && rank >= 0 && rank < world_size,
      "[WindowOrder::next] expected per_rank >= 1 and 0 <= rank < world_size, got ", per_rank, ", ", rank, " and ",
      world_size);
  std::vector<std::int64_t> mine;
  mine.reserve(per_rank);
  for (std::int64_t i = 0; i < per_rank * world_size; ++i) {
    if (cursor_.position == static_cast<std::int64_t>(permutation_.size())) {
      open_epoch(cursor_.epoch + 1);
    }
    if (i / per_rank == rank) {
      mine.push_back(permutation_[cursor_.position]);
    }
    ++cursor_.position;
  }
  return mine;
}

void WindowOrder::seek(const Cursor& cursor) {
  const auto count = static_cast<std::int64_t>(permutation_.size());
  TORCH_CHECK_VALUE(
      cursor.epoch >= 0 && cursor.position >= 0 && cursor.position <= count,
      "[WindowOrder::seek] expected epoch >= 0 and position in [0, ", count, "], got ", cursor.epoch, " and ",
      cursor.position, "; the cursor belongs to other files or another context");
  if (cursor.epoch != cursor_.epoch) {
    open_epoch(cursor.epoch);
  }
  cursor_ = cursor;
}

void WindowOrder::open_epoch(std::int64_t epoch) {
  permutation_ =
      Rng(seed_).fork("windows").fork(std::to_string(epoch)).permutation(corpus_->num_windows(Split::kTrain));
  cursor_ = {epoch, 0};
}

} // namespace ebb::data
