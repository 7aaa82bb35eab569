#pragma once

#include <c10/util/Exception.h>

#include <string>

namespace ebb {

// Note [Errors]
// A caller's mistake is c10::ValueError, thrown by TORCH_CHECK_VALUE with the text
//   [function] what was expected, got what came; do this.
// A bug of ebb is TORCH_INTERNAL_ASSERT. What a program may want to branch on is one of the types below. All of
// them are c10::Error, so `catch (const c10::Error&)` sees every error that ebb raises on purpose.

/// Root of the errors that programs branch on.
class Error : public c10::Error {
 public:
  Error(c10::SourceLocation where, std::string message) : c10::Error(where, std::move(message)) {}
};

/// A file or message is not what its format promises: truncated, corrupt, of another version, hostile.
class FormatError : public Error {
  using Error::Error;
};

/// A peer died, stopped answering, or left the group. The group cannot be used any more.
class RankLostError : public Error {
 public:
  /// @param rank  The lost rank in the group that reports it; -1 when it is not known which.
  RankLostError(c10::SourceLocation where, std::string message, int rank)
      : Error(where, std::move(message)), rank_(rank) {}
  int rank() const {
    return rank_;
  }

 private:
  int rank_;
};

/// A peer is alive but did not arrive at a collective before the timeout.
class TimeoutError : public Error {
  using Error::Error;
};

/// Two states, or a state and its options, do not belong together.
class IncompatibleStateError : public Error {
  using Error::Error;
};

/// The text of an exception for people: without LibTorch's C++ backtrace.
std::string message_of(const std::exception& error);

/// Exit codes of the `ebb` program; fixed, so that scripts can rely on them.
enum class ExitCode : int { kDone = 0, kFailure = 1, kWrongUse = 2, kBadData = 3, kLostPeer = 4, kPreempted = 5 };

/// The exit code that `error` stands for. Anything unknown is kFailure.
ExitCode exit_code_of(const std::exception& error);

} // namespace ebb

/// Throws one of the types above with a formatted message: EBB_THROW(FormatError, "[load] ", path, " is truncated").
#define EBB_THROW(Type, ...) \
  throw ::ebb::Type(::c10::SourceLocation{__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, ::c10::str(__VA_ARGS__))
