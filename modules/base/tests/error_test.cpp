#include "ebb/base/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

namespace ebb {
namespace {

using ::testing::HasSubstr;

template <class Body>
ExitCode code_of(Body body) {
  try {
    body();
  } catch (const std::exception& error) {
    return exit_code_of(error);
  }
  return ExitCode::kDone;
}

TEST(Error, EachTypeHasItsExitCode) {
  EXPECT_EQ(code_of([] { EBB_THROW(FormatError, "x"); }), ExitCode::kBadData);
  EXPECT_EQ(code_of([] { EBB_THROW(TimeoutError, "x"); }), ExitCode::kLostPeer);
  EXPECT_EQ(code_of([] { throw RankLostError({"f", "f.cpp", 1}, "x", 3); }), ExitCode::kLostPeer);
  EXPECT_EQ(code_of([] { EBB_THROW(IncompatibleStateError, "x"); }), ExitCode::kWrongUse);
  EXPECT_EQ(code_of([] { TORCH_CHECK_VALUE(false, "x"); }), ExitCode::kWrongUse);
  EXPECT_EQ(code_of([] { TORCH_CHECK(false, "x"); }), ExitCode::kFailure);
  EXPECT_EQ(code_of([] { throw std::runtime_error("x"); }), ExitCode::kFailure);
}

TEST(Error, ExitCodesAreThoseThatScriptsRelyOn) {
  EXPECT_EQ(static_cast<int>(ExitCode::kDone), 0);
  EXPECT_EQ(static_cast<int>(ExitCode::kFailure), 1);
  EXPECT_EQ(static_cast<int>(ExitCode::kWrongUse), 2);
  EXPECT_EQ(static_cast<int>(ExitCode::kBadData), 3);
  EXPECT_EQ(static_cast<int>(ExitCode::kLostPeer), 4);
  EXPECT_EQ(static_cast<int>(ExitCode::kPreempted), 5);
}

TEST(Error, MessageIsThatOfTheThrowerAlone) {
  try {
    EBB_THROW(FormatError, "[load] ", "a.bin", " is truncated at byte ", 7);
  } catch (const c10::Error& error) {
    EXPECT_EQ(message_of(error), "[load] a.bin is truncated at byte 7");
  }
  EXPECT_EQ(message_of(std::runtime_error("plain")), "plain");
}

TEST(Error, AllOwnTypesAreC10Errors) {
  EXPECT_THROW(EBB_THROW(FormatError, "x"), c10::Error);
  EXPECT_THROW(EBB_THROW(TimeoutError, "x"), Error);
  EXPECT_THROW(EBB_THROW(IncompatibleStateError, "x"), Error);
}

TEST(Error, ALostRankIsCarriedAlong) {
  try {
    throw RankLostError({"wait", "f.cpp", 1}, "rank 3 is lost", 3);
  } catch (const RankLostError& error) {
    EXPECT_EQ(error.rank(), 3);
    EXPECT_EQ(message_of(error), "rank 3 is lost");
  }
}

TEST(Error, KnowsWhereItWasThrown) {
  try {
    EBB_THROW(FormatError, "x");
  } catch (const c10::Error& error) {
    EXPECT_THAT(std::string(error.what()), HasSubstr("error_test.cpp"));
  }
}

} // namespace
} // namespace ebb
