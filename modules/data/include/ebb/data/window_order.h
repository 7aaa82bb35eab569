#pragma once

#include "ebb/data/byte_corpus.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace ebb::data {

/// Sequences for one forward. Legend: B sequences, T = context.
struct Batch {
  at::Tensor tokens_BT; ///< int64, 0 to 255; CPU, contiguous.
  at::Tensor targets_BT; ///< int64; the byte after each token.
};

/// The windows at `indices` of `split` as one batch.
Batch make_batch(const ByteCorpus& corpus, Split split, const std::vector<std::int64_t>& indices);

/// How far an order has been read. The same at every world size and batch size.
struct Cursor {
  std::int64_t epoch = 0;
  std::int64_t position = 0; ///< Windows of this epoch already read.
  bool operator==(const Cursor&) const = default;
};

/// The training windows in the order in which a job reads them: one endless sequence, the concatenation of one random
/// permutation an epoch, which depends on the seed and the epoch alone.
///
/// A global batch of n windows is the next n of the sequence; rank r of W takes the r-th of its W equal parts. So
/// training with W ranks of m windows reads the same as one rank of W x m, and a cursor can be taken up with another
/// number of ranks.
///
/// Memory: 8 bytes a window.
class WindowOrder {
 public:
  WindowOrder(std::shared_ptr<const ByteCorpus> corpus, std::uint64_t seed);

  /// The next global batch's part for `rank`; moves on by per_rank x world_size windows. Not collective: every rank
  /// keeps an order of its own and calls it with the same sizes.
  std::vector<std::int64_t> next(std::int64_t per_rank, int rank, int world_size);

  Cursor cursor() const {
    return cursor_;
  }
  /// @throws ValueError when the cursor is outside of this corpus.
  void seek(const Cursor& cursor);

 private:
  void open_epoch(std::int64_t epoch);

  std::shared_ptr<const ByteCorpus> corpus_;
  std::uint64_t seed_;
  Cursor cursor_;
  std::vector<std::int64_t> permutation_;
};

} // namespace ebb::data
