#pragma once

#include "ebb/base/error.h"

#include <c10/util/Exception.h>

#include <functional>
#include <string>

namespace ebb::test {

/// What `call` says when it throws an `Error`; "none" when it throws nothing. Other kinds of errors pass through.
template <class Error = c10::ValueError>
std::string complaint(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return message_of(error);
  }
  return "none";
}

} // namespace ebb::test
