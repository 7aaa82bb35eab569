#pragma once

#include "ebb/comm/work.h"

namespace ebb::shard {

/// What was done before it was asked for.
class FinishedWork final : public comm::Work {
 public:
  bool poll() override {
    return true;
  }
  void wait() override {}
};

} // namespace ebb::shard
