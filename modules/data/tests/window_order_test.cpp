#include "ebb/data/window_order.h"

#include "support/temporary_folder.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

namespace ebb::data {
namespace {

std::shared_ptr<const ByteCorpus> corpus_of_101_bytes(const test::TemporaryFolder& folder) {
  std::string text;
  for (int i = 0; i < 101; ++i) {
    text += static_cast<char>(i + 100); // beyond 127 as well: bytes are unsigned
  }
  return std::make_shared<ByteCorpus>(
      ByteCorpusOptions{.files = {folder.write("a.txt", text)}, .context = 5, .validation_fraction = 0.0});
}

std::vector<std::int64_t> read(WindowOrder& order, int batches, std::int64_t per_rank, int rank, int world_size) {
  std::vector<std::int64_t> all;
  for (int i = 0; i < batches; ++i) {
    const auto part = order.next(per_rank, rank, world_size);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

TEST(WindowOrder, ReadsEveryWindowOnceAnEpochInAnotherOrderEachTime) {
  const test::TemporaryFolder folder;
  const auto corpus = corpus_of_101_bytes(folder);
  ASSERT_EQ(corpus->num_windows(Split::kTrain), 20);
  WindowOrder order(corpus, 7);
  auto first = read(order, 5, 4, 0, 1);
  auto second = read(order, 5, 4, 0, 1);
  EXPECT_NE(first, second);
  std::vector<std::int64_t> all(20);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_NE(first, all);
  EXPECT_TRUE(std::is_permutation(first.begin(), first.end(), all.begin(), all.end()));
  EXPECT_TRUE(std::is_permutation(second.begin(), second.end(), all.begin(), all.end()));
}

TEST(WindowOrder, DependsOnTheSeedAlone) {
  const test::TemporaryFolder folder;
  const auto corpus = corpus_of_101_bytes(folder);
  WindowOrder a(corpus, 7), again(corpus, 7), other(corpus, 8);
  const auto expected = read(a, 5, 4, 0, 1);
  EXPECT_EQ(read(again, 5, 4, 0, 1), expected);
  EXPECT_NE(read(other, 5, 4, 0, 1), expected);
}

TEST(WindowOrder, GivesTheSameGlobalBatchesAtAnyWorldSize) {
  const test::TemporaryFolder folder;
  const auto corpus = corpus_of_101_bytes(folder);
  WindowOrder whole(corpus, 7);
  std::vector<WindowOrder> ranks(3, WindowOrder(corpus, 7));
  for (int batch = 0; batch < 8; ++batch) { // 48 windows: crosses two ends of epochs, which are inside a batch
    std::vector<std::int64_t> joined;
    for (int rank = 0; rank < 3; ++rank) {
      const auto part = ranks[rank].next(2, rank, 3);
      ASSERT_EQ(part.size(), 2u);
      joined.insert(joined.end(), part.begin(), part.end());
    }
    EXPECT_EQ(joined, whole.next(6, 0, 1)) << "batch " << batch;
  }
  EXPECT_EQ(ranks[2].cursor(), (Cursor{2, 8}));
}

TEST(WindowOrder, GoesOnFromACursorWithAnotherNumberOfRanks) {
  const test::TemporaryFolder folder;
  const auto corpus = corpus_of_101_bytes(folder);
  WindowOrder uninterrupted(corpus, 7);
  read(uninterrupted, 9, 3, 0, 1);
  const auto cursor = uninterrupted.cursor();
  EXPECT_EQ(cursor, (Cursor{1, 7}));
  const auto expected = read(uninterrupted, 1, 8, 0, 1);
  std::vector<std::int64_t> joined;
  for (int rank = 0; rank < 2; ++rank) {
    WindowOrder resumed(corpus, 7);
    resumed.seek(cursor);
    const auto part = resumed.next(4, rank, 2);
    joined.insert(joined.end(), part.begin(), part.end());
  }
  EXPECT_EQ(joined, expected);
}

TEST(WindowOrder, RefusesACursorOfAnotherCorpus) {
  const test::TemporaryFolder folder;
  WindowOrder order(corpus_of_101_bytes(folder), 7);
  EXPECT_THROW(order.seek({0, 21}), c10::ValueError);
  EXPECT_THROW(order.seek({-1, 0}), c10::ValueError);
  order.seek({3, 20});
  EXPECT_EQ(order.next(1, 0, 1).size(), 1u);
  EXPECT_EQ(order.cursor(), (Cursor{4, 1}));
}

TEST(MakeBatch, TargetsAreTheNextBytes) {
  const test::TemporaryFolder folder;
  const auto corpus = corpus_of_101_bytes(folder);
  const auto batch = make_batch(*corpus, Split::kTrain, {2, 0});
  EXPECT_EQ(batch.tokens_BT.dtype(), torch::kLong);
  EXPECT_TRUE(
      batch.tokens_BT.equal(torch::tensor({{110, 111, 112, 113, 114}, {100, 101, 102, 103, 104}}, torch::kLong)));
  EXPECT_TRUE(
      batch.targets_BT.equal(torch::tensor({{111, 112, 113, 114, 115}, {101, 102, 103, 104, 105}}, torch::kLong)));
  const auto last = make_batch(*corpus, Split::kTrain, {19});
  EXPECT_EQ(last.targets_BT[0][4].item<std::int64_t>(), 200); // a byte above 127 stays positive
}

} // namespace
} // namespace ebb::data
