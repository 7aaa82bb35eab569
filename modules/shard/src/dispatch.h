#pragma once

#include <c10/core/DispatchKey.h>

namespace ebb::shard {

// The key that sharded parameters, their views and their shards carry. LibTorch 2.15 reserves it for deferred
// initialisation in C++ and registers nothing on it. It lies above autograd, so that the fallback sees an operator once,
// before anything of it has run.
inline constexpr c10::DispatchKey kPagedKey = c10::DispatchKey::DeferredInit;

/// Registers the fallback with the process-wide dispatcher, once. The only global state of ebb: the dispatcher itself
/// is global, and kernels find their engine through the tensors they are given.
void install_fallback();

/// Lets ebb itself replace parameters' data and write to them on this thread while alive.
class OwnAccess {
 public:
  OwnAccess();
  ~OwnAccess();
  OwnAccess(const OwnAccess&) = delete;
  OwnAccess& operator=(const OwnAccess&) = delete;
  static bool active();
};

} // namespace ebb::shard
