#pragma once

namespace gloo::transport {

// Destructors are pure and never defined, so that no vtable of these classes can be made outside LibTorch.
class Device {
 public:
  virtual ~Device() = 0;
};

class UnboundBuffer {
 public:
  virtual ~UnboundBuffer() = 0;
};

} // namespace gloo::transport
