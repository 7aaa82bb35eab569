#include "ebb/base/error.h"

namespace ebb {

std::string message_of(const std::exception& error) {
  if (const auto* c10_error = dynamic_cast<const c10::Error*>(&error)) {
    return c10_error->what_without_backtrace();
  }
  return error.what();
}

ExitCode exit_code_of(const std::exception& error) {
  if (dynamic_cast<const RankLostError*>(&error) || dynamic_cast<const TimeoutError*>(&error)) {
    return ExitCode::kLostPeer;
  }
  if (dynamic_cast<const FormatError*>(&error)) {
    return ExitCode::kBadData;
  }
  if (dynamic_cast<const c10::ValueError*>(&error) || dynamic_cast<const IncompatibleStateError*>(&error)) {
    return ExitCode::kWrongUse;
  }
  return ExitCode::kFailure;
}

} // namespace ebb
