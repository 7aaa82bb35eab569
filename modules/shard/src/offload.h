#pragma once

#include "ebb/shard/offload.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace ebb::shard {

/// A copy under way. What is in host memory stays alive until it is done; the device's part of it is the caller's
/// business, see Note [Streams].
class Copy {
 public:
  virtual ~Copy() = default;
  /// Returns when the destination may be read by what follows here: by later work on the device's current stream, or on
  /// the host. Throws what the copy threw.
  virtual void wait() = 0;
};

/// Whether a copy is to the device or to its tier.
enum class Direction : std::uint8_t { kToDevice, kToTier };

/// Copies between a tier and a device while other work goes on. Copies of one copier happen in the order they were asked
/// for.
class Copier {
 public:
  virtual ~Copier() = default;
  /// `to` and `from` have the same sizes; dtypes may differ. What the current stream has been given so far comes before
  /// it.
  virtual std::shared_ptr<Copy> copy(at::Tensor to, at::Tensor from, Direction direction) = 0;

  /// A thread for the CPU, a stream for accelerators.
  static std::unique_ptr<Copier> make(c10::Device device, const OffloadPolicy& policy);
};

/// Memory outside the device, and the way there and back.
class Tier {
 public:
  /// @throws ValueError for a policy that the device excludes; RuntimeError where the file cannot be made.
  /// `function` is who asked, for messages.
  Tier(const OffloadPolicy& policy, c10::Device device, std::string function = "fully_shard");
  ~Tier();

  /// Zeros, 1-D. @throws OutOfMemoryError where the disk is full; names the folder and what was asked for.
  at::Tensor zeros(std::int64_t numel, c10::ScalarType dtype);
  /// Begins to copy from the tier to the device.
  std::shared_ptr<Copy> fetch(at::Tensor to, at::Tensor from) {
    return copier_->copy(std::move(to), std::move(from), Direction::kToDevice);
  }
  /// Begins to copy from the device to the tier.
  std::shared_ptr<Copy> store(at::Tensor to, at::Tensor from) {
    return copier_->copy(std::move(to), std::move(from), Direction::kToTier);
  }
  /// From here on copies by a stream of `device`. For tests.
  void use_streams(c10::Device device) {
    copier_ = Copier::make(device, policy_);
  }
  /// Bytes of live tensors in it.
  std::int64_t bytes() const;
  /// "pinned host memory", "a file in /scratch"
  std::string describe() const;

 private:
  class File;
  OffloadPolicy policy_;
  std::shared_ptr<File> file_; ///< Shared with the tensors that are on it.
  std::shared_ptr<std::int64_t> pinned_bytes_;
  std::unique_ptr<Copier> copier_;
};

} // namespace ebb::shard
