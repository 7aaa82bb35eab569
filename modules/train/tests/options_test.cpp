#include "ebb/train/train_options.h"

#include "ebb/base/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>

namespace ebb::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string complaint(const TrainOptions& options) {
  try {
    check_options(options, "test");
  } catch (const c10::ValueError& error) {
    return message_of(error);
  }
  return {};
}

TEST(Options, AreCheckedAgainstTheBoundsOfTheirList) {
  EXPECT_EQ(complaint({}), "");
  EXPECT_THAT(complaint({.steps = 0}), AllOf(HasSubstr("[test] steps"), HasSubstr("at least 1"), HasSubstr("got 0")));
  EXPECT_THAT(complaint({.lr = 0}), AllOf(HasSubstr("lr"), HasSubstr("above 0"), HasSubstr("got 0")));
  EXPECT_THAT(complaint({.lr = std::nan("")}), HasSubstr("lr"));
  EXPECT_THAT(complaint({.betas = {0.9, 1.0}}), AllOf(HasSubstr("betas"), HasSubstr("in [0, 1)"), HasSubstr("got 1")));
  EXPECT_EQ(complaint({.betas = {0.0, 0.999}}), "");
}

TEST(Options, AreWrittenSoThatTheyReadBackTheSame) {
  EXPECT_EQ(option_text(0.1), "0.1");
  EXPECT_EQ(option_text(4e-3), "0.004");
  EXPECT_EQ(std::stod(option_text(1.0 / 3.0)), 1.0 / 3.0);
  EXPECT_EQ(option_text(std::array<double, 2>{0.9, 0.99}), "0.9,0.99");
  EXPECT_EQ(option_text(std::vector<std::string>{"a", "b"}), "a,b");
  EXPECT_EQ(option_text(std::optional<std::int64_t>()), "");
  EXPECT_EQ(option_text(true), "true");
}

TEST(Options, ListEveryFieldOnce) {
  std::set<std::string> names;
  for (const auto& [name, value] : option_values(TrainOptions{})) {
    EXPECT_TRUE(names.insert(name).second) << name;
  }
  // A member that fields() forgets would change the size and not this count.
  EXPECT_EQ(names.size(), 18u);
  EXPECT_EQ(sizeof(TrainOptions), 15 * 8 + 2 * 8 + 2 * sizeof(std::string));
}

} // namespace
} // namespace ebb::train
