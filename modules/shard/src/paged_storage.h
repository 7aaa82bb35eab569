#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

namespace ebb::shard {

class Engine;
struct FlatParameter;

// Note [Paged storage]
// A sharded parameter keeps its TensorImpl, shape and autograd identity for life; only the bytes of its storage come and
// go. The storage is of a type of our own, so that any tensor on it (a view, a detached alias, a saved variable) leads
// to its owner by one pointer comparison and one cast, with no table and no lock. The tag that proves the type is the
// address of the storage's allocator.

/// What a paged storage holds.
enum class PageKind {
  kUnsharded, ///< The parameters the model sees; has bytes only while its unit is resident.
  kShard, ///< This rank's shard; always has bytes. Known to the fallback because writes make gathered copies stale.
  kFull, ///< Inside a full-parameter scope, in full precision or on the CPU: of a mixed model, or by offload_to_cpu.
};

/// Shared by a flat parameter and every storage that belongs to it. Views that a user keeps may outlive the engine;
/// they then find `engine` null.
struct PageOwner {
  std::atomic<Engine*> engine{nullptr};
  FlatParameter* flat = nullptr; ///< Valid while engine is not null.
  std::string unit_name;
};

class PagedStorage : public c10::StorageImpl {
 public:
  PagedStorage(std::shared_ptr<PageOwner> owner, PageKind kind, std::size_t bytes, c10::Device device);

  PageOwner& owner() const {
    return *owner_;
  }
  PageKind kind() const {
    return kind_;
  }

  /// Puts the storage on `memory` (uint8), from byte `offset`, and keeps that alive. Raw access works from here on.
  void fill(const at::Tensor& memory, std::int64_t offset);
  /// Takes the bytes away; raw access throws `message` from here on.
  void empty(const std::string& message);

  /// The paged storage under `tensor`, or nullptr.
  static PagedStorage* of(const at::Tensor& tensor) {
    auto* impl = tensor.unsafeGetTensorImpl();
    if (!impl->has_storage()) {
      return nullptr;
    }
    auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
    return storage->allocator() == tag() ? static_cast<PagedStorage*>(storage) : nullptr;
  }

 private:
  static c10::Allocator* tag();
  std::shared_ptr<PageOwner> owner_;
  PageKind kind_;
};

/// The strides of `tensor`; contiguous ones where it has gaps or overlaps.
std::vector<std::int64_t> dense_strides(const at::Tensor& tensor);

/// A tensor of `sizes` and `strides`, from element `offset` of `storage`; with ebb's dispatch key when `paged`.
at::Tensor tensor_on(
    const c10::Storage& storage, bool paged, c10::ScalarType dtype, std::int64_t offset, at::IntArrayRef sizes,
    at::IntArrayRef strides);
/// The same, contiguous.
at::Tensor tensor_on(
    const c10::Storage& storage, bool paged, c10::ScalarType dtype, std::int64_t offset, at::IntArrayRef sizes);

} // namespace ebb::shard
