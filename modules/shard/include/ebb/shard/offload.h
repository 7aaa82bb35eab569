#pragma once

#include <functional>
#include <string>

namespace ebb::shard {

/// Where offloaded tensors are.
enum class OffloadTier {
  kHost, ///< Page-locked host memory, for models on an accelerator (FSDP2's CPUOffloadPolicy).
  kFile, ///< A memory-mapped file that the kernel writes out when memory is short, for models on any device.
};

/// What ShardOptions::offload asks for: this rank's shards, their gradients, and what optimizers make of them by
/// zeros_like() (Adam's, AdamW's and RMSprop's moments) live in the tier. Shards are copied to the device ahead of their
/// gather and gradients back while backward goes on. Optimizers run on the CPU, where the leaves are. Values are those of
/// a model that is not offloaded, bit for bit.
struct OffloadPolicy {
  OffloadTier tier = OffloadTier::kHost;
  /// kFile: the folder for the file, which has no name and is gone with its process. Empty: that of temporary files.
  /// Needs room for this rank's shards, gradients and optimizer state. A local disk, not a network's.
  std::string folder = {};
  /// Called before each copy, on the thread that copies, which it may delay; for tests. CPU models only.
  std::function<void()> before_copy = {};
};

} // namespace ebb::shard
