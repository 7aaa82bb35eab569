#include "ebb/train/train_options.h"

#include "ebb/base/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <optional>
#include <set>

namespace ebb::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string refusal_of(const TrainOptions& options) {
  try {
    check_options(options, "test");
  } catch (const c10::ValueError& error) {
    return message_of(error);
  }
  return {};
}

TEST(Options, AreCheckedAgainstTheBoundsOfTheirList) {
  EXPECT_EQ(refusal_of({}), "");
  EXPECT_THAT(
      refusal_of({.steps = 0}),
      AllOf(HasSubstr("[test] steps"), HasSubstr("in [1, 1000000000000]"), HasSubstr("got 0")));
  EXPECT_THAT(refusal_of({.lr = 0}), AllOf(HasSubstr("lr"), HasSubstr("above 0"), HasSubstr("got 0")));
  EXPECT_THAT(refusal_of({.lr = std::nan("")}), HasSubstr("lr"));
  EXPECT_THAT(refusal_of({.betas = {0.9, 1.0}}), AllOf(HasSubstr("betas"), HasSubstr("in [0, 1)"), HasSubstr("got 1")));
  EXPECT_EQ(refusal_of({.betas = {0.0, 0.999}}), "");
}

TEST(Options, MustBeFiniteNumbersAndKeepToTheirUpperBounds) {
  const double infinity = std::numeric_limits<double>::infinity();
  // Each number of the list, whatever its bounds.
  int numbers = 0;
  TrainOptions::fields([&](std::string_view name, auto member, std::string_view, const Bounds& bounds) {
    using Member = std::decay_t<decltype(TrainOptions{}.*member)>;
    for (const double wrong : {infinity, -infinity, std::nan("")}) {
      if constexpr (std::is_same_v<Member, double> || std::is_same_v<Member, std::optional<double>>) {
        EXPECT_THAT(violation(Member(wrong), bounds), HasSubstr("expected a finite number")) << name << " " << wrong;
        ++numbers;
      } else if constexpr (std::is_same_v<Member, std::array<double, 2>>) {
        EXPECT_NE(violation(Member{0.9, wrong}, bounds), "") << name << " " << wrong;
        ++numbers;
      }
    }
  });
  EXPECT_EQ(numbers, 3 * 7);
  EXPECT_THAT(refusal_of({.batch = 100'000'000'000}), AllOf(HasSubstr("[1, 1000000]"), HasSubstr("got 100000000000")));
  EXPECT_THAT(refusal_of({.prompt = ""}), AllOf(HasSubstr("prompt"), HasSubstr("at least one byte")));
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
  EXPECT_EQ(names.size(), 20u);
  EXPECT_EQ(
      sizeof(TrainOptions),
      15 * 8 + 2 * 8 + sizeof(std::optional<double>) + 2 * sizeof(std::string) + sizeof(std::vector<std::string>));
}

} // namespace
} // namespace ebb::train
