#include "streams/recorded_device.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "ebb/comm/init.h"

namespace ebb::shard {
namespace {

using test::RecordedDevice;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

c10::Stream side_stream() {
  return c10::impl::VirtualGuardImpl(RecordedDevice::device().type())
      .getStreamFromGlobalPool(RecordedDevice::device(), false);
}

std::vector<std::string> texts_of(const RecordedDevice& device) {
  std::vector<std::string> texts;
  for (const auto& hazard : device.hazards()) {
    texts.push_back(hazard.text());
  }
  return texts;
}

/// What was given to `first` so far comes before what `then` is given from here on.
void order(c10::Stream first, c10::Stream then) {
  c10::Event event(first.device_type());
  event.record(first);
  event.block(then);
}

TEST(RecordedDevice, AReadOnAnotherStreamNeedsAnEventAfterTheWrite) {
  for (const bool ordered : {false, true}) {
    const RecordedDevice device;
    const auto side = side_stream();
    const auto main = c10::impl::VirtualGuardImpl(side.device_type()).getStream(side.device());
    auto x = at::ones({8});
    order(main, side);
    {
      const c10::StreamGuard guard(side);
      x.mul_(2);
    }
    if (ordered) {
      order(side, main);
    }
    EXPECT_TRUE(at::equal(x.narrow(0, 4, 4), at::full({4}, 2.0)));
    if (ordered) {
      EXPECT_THAT(texts_of(device), IsEmpty());
    } else {
      EXPECT_THAT(texts_of(device), ::testing::Contains("equal on compute may read before mul_ on gather"));
    }
  }
}

TEST(RecordedDevice, OtherBytesOfTheSameMemoryAreNoHazard) {
  const RecordedDevice device;
  const auto side = side_stream();
  const auto main = c10::impl::VirtualGuardImpl(side.device_type()).getStream(side.device());
  auto x = at::ones({8});
  order(main, side);
  {
    const c10::StreamGuard guard(side);
    x.narrow(0, 0, 4).zero_();
  }
  x.narrow(0, 4, 4).zero_();
  EXPECT_THAT(texts_of(device), IsEmpty());
  x.narrow(0, 3, 4).add_(1);
  EXPECT_THAT(texts_of(device), ElementsAre("add_ on compute may reuse before zero_ on gather"));
}

TEST(RecordedDevice, AWriteAndTheEndOfABlockNeedAnEventAfterTheLastRead) {
  const RecordedDevice device;
  const auto side = side_stream();
  const auto main = c10::impl::VirtualGuardImpl(side.device_type()).getStream(side.device());
  auto x = at::ones({8});
  auto y = at::ones({8});
  order(main, side);
  {
    const c10::StreamGuard guard(side);
    (void)x.sum();
    (void)y.sum();
  }
  x.zero_();
  y = at::Tensor();
  EXPECT_THAT(
      texts_of(device), ElementsAre(
                            "zero_ on compute may reuse before sum on gather",
                            "the memory's next life on compute may reuse before sum on gather"));
}

TEST(RecordedDevice, AWaitForAnEventDoesNotCoverWhatCameAfterIt) {
  const RecordedDevice device;
  const auto side = side_stream();
  const auto main = c10::impl::VirtualGuardImpl(side.device_type()).getStream(side.device());
  auto x = at::ones({8});
  order(main, side);
  c10::Event event(side.device_type());
  {
    const c10::StreamGuard guard(side);
    x.mul_(2);
    event.record(side);
    x.add_(1);
  }
  event.block(main);
  (void)x.sum();
  EXPECT_THAT(texts_of(device), ElementsAre("sum on compute may read before add_ on gather"));
}

TEST(RecordedDevice, ACollectiveComesAfterTheCurrentStreamAndIsWaitedForByIt) {
  for (const bool waits : {false, true}) {
    RecordedDevice device;
    const auto group = device.over(comm::single());
    const auto input = at::ones({4});
    auto output = at::empty({4});
    const auto work = group->all_gather(output, input, "unit");
    if (waits) {
      work->wait();
    }
    (void)output.sum();
    if (waits) {
      EXPECT_THAT(texts_of(device), IsEmpty());
    } else {
      EXPECT_THAT(texts_of(device), ElementsAre("sum on compute may read before all_gather on nccl"));
    }
    work->wait();
  }
}

} // namespace
} // namespace ebb::shard
