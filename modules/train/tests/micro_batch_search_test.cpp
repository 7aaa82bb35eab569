#include "ebb/train/micro_batch_search.h"

#include "ebb/train/memory.h"
#include "support/complaint.h"
#include "support/spawn_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <new>
#include <string>
#include <vector>

namespace ebb::train {
namespace {

using ebb::test::complaint;

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::int64_t bytes_of(std::int64_t micro_batch) {
  return 1000 + 10 * micro_batch;
}

TEST(MicroBatchSearch, DoublesThenBisects) {
  std::vector<std::int64_t> tried;
  const auto found = largest_micro_batch(
      *comm::single(),
      [&](std::int64_t size) {
        tried.push_back(size);
        return bytes_of(size);
      },
      {.budget_bytes = bytes_of(13)});
  EXPECT_EQ(found, 13);
  EXPECT_THAT(tried, ElementsAre(1, 2, 4, 8, 16, 12, 14, 13));
}

TEST(MicroBatchSearch, FindsEveryLimit) {
  for (std::int64_t largest = 1; largest <= 40; ++largest) {
    for (std::int64_t limit = 1; limit <= 45; ++limit) {
      std::int64_t probes = 0;
      const auto found = largest_micro_batch(
          *comm::single(),
          [&](std::int64_t size) {
            EXPECT_LE(size, largest);
            ++probes;
            return bytes_of(size);
          },
          {.budget_bytes = bytes_of(limit), .largest = largest});
      EXPECT_EQ(found, std::min(limit, largest));
      EXPECT_LE(probes, 12);
    }
  }
}

TEST(MicroBatchSearch, TakesTheSmallestOfWhatFitsTheRanks) {
  ebb::test::spawn_ranks(3, [](const std::shared_ptr<comm::Communicator>& world) {
    const std::int64_t limits[] = {50, 11, 30};
    std::vector<std::int64_t> tried;
    const auto found = largest_micro_batch(
        *world,
        [&](std::int64_t size) {
          tried.push_back(size);
          const auto together = at::full({1}, static_cast<double>(size), at::kDouble);
          world->all_reduce(together, comm::ReduceOp::kMax, 1, "probe")->wait(); // as a sharded model's forward
          EXPECT_EQ(together.item<double>(), static_cast<double>(size));
          return bytes_of(size);
        },
        {.budget_bytes = bytes_of(limits[world->rank()])});
    EXPECT_EQ(found, 11);
    EXPECT_THAT(tried, ElementsAre(1, 2, 4, 8, 16, 12, 10, 11));
  });
}

TEST(MicroBatchSearch, TakesRunningOutOfMemoryForTooLarge) {
  const std::vector<std::function<void()>> failures = {
      [] { throw std::bad_alloc(); },
      [] {
        throw c10::OutOfMemoryError(c10::SourceLocation{__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, "full");
      },
#ifndef __SANITIZE_ADDRESS__ // whose allocator ends the program instead
      [] { at::empty({std::int64_t(1) << 52}, at::kByte); },
#endif
  };
  for (const auto& fail : failures) {
    ebb::test::spawn_ranks(2, [&](const std::shared_ptr<comm::Communicator>& world) {
      const auto found = largest_micro_batch(
          *world,
          [&](std::int64_t size) {
            if (world->rank() == 1 && size > 5) {
              fail();
            }
            return bytes_of(size);
          },
          {});
      EXPECT_EQ(found, 5);
    });
  }
}

TEST(MicroBatchSearch, SaysOnEveryRankThatNotEvenOneFits) {
  ebb::test::spawn_ranks(2, [](const std::shared_ptr<comm::Communicator>& world) {
    const auto probe = [&](std::int64_t size) { return bytes_of(size) + world->rank(); };
    EXPECT_THAT(
        complaint([&] { largest_micro_batch(*world, probe, {.budget_bytes = 1010}); }),
        AllOf(HasSubstr("a micro-batch of 1 to fit"), HasSubstr("rank 1 needs 1011 bytes of 1010")));
    const auto full = [&](std::int64_t size) { return world->rank() == 0 ? throw std::bad_alloc() : bytes_of(size); };
    EXPECT_THAT(
        complaint([&] { largest_micro_batch(*world, full, {}); }),
        AllOf(HasSubstr("a micro-batch of 1 to fit"), HasSubstr("rank 0 ran out of memory")));
    EXPECT_THAT(
        complaint([&] { largest_micro_batch(*world, bytes_of, {.largest = world->rank()}); }), HasSubstr("at least 1"));
  });
  EXPECT_THAT(
      complaint([] { largest_micro_batch(*comm::single(), bytes_of, {.budget_bytes = 0}); }),
      HasSubstr("a probe, 0 bytes and 1024"));
  EXPECT_THAT(complaint([] { largest_micro_batch(*comm::single(), {}, {}); }), HasSubstr("no probe"));
}

TEST(MicroBatchSearch, DoesNotTakeAnotherErrorForTooLarge) {
  ebb::test::spawn_ranks(2, [](const std::shared_ptr<comm::Communicator>& world) {
    std::string what;
    try {
      largest_micro_batch(
          *world,
          [&](std::int64_t size) {
            TORCH_CHECK(size < 4 || world->rank() == 0, "a bug in the model");
            return bytes_of(size);
          },
          {});
    } catch (const c10::Error& error) {
      what = error.what_without_backtrace();
    }
    EXPECT_THAT(what, HasSubstr("a bug in the model"));
    EXPECT_EQ(what.find("failed on rank 1") != std::string::npos, world->rank() == 0) << what;
  });
}

TEST(PeakMemory, IsThatOfTheWork) {
  constexpr std::size_t kBytes = 96 << 20;
  const auto use = [](std::size_t bytes) {
    return [bytes] {
      const auto memory = at::empty({static_cast<std::int64_t>(bytes)}, at::kByte);
      std::memset(memory.data_ptr(), 1, bytes);
    };
  };
  const auto nothing = peak_memory_bytes_of([] {});
  const auto much = peak_memory_bytes_of(use(kBytes));
  const auto little = peak_memory_bytes_of(use(kBytes / 4));
  constexpr double kSlack = 8 << 20; // code and heap that come and go meanwhile
  EXPECT_NEAR(static_cast<double>(much - nothing), kBytes, kSlack);
  EXPECT_NEAR(static_cast<double>(little - nothing), kBytes / 4.0, kSlack);
}

TEST(PeakMemory, LeadsTheSearchToTheBudget) {
  constexpr std::int64_t kSample = 8 << 20;
  const auto probe = [](std::int64_t size) {
    return peak_memory_bytes_of([size] { at::ones({size * kSample}, at::kByte); });
  };
  const auto base = peak_memory_bytes_of([] {});
  const auto found = largest_micro_batch(*comm::single(), probe, {.budget_bytes = base + 6 * kSample + kSample / 2});
  EXPECT_EQ(found, 6);
}

} // namespace
} // namespace ebb::train
