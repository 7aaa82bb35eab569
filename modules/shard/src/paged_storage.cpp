#include "paged_storage.h"

#include "dispatch.h"
#include "op_results.h"

#include <c10/util/strides.h>

#include <torch/torch.h>

namespace ebb::shard {
namespace {

// Never asked for memory: paged storages are not resizable. Its address is the type tag of PagedStorage.
class TagAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t) override {
    TORCH_CHECK(false, "[ebb] a sharded parameter cannot be resized; reshape a copy of it instead");
  }
  void copy_data(void* destination, const void* source, std::size_t count) const override {
    default_copy_data(destination, source, count);
  }
};

} // namespace

c10::Allocator* PagedStorage::tag() {
  static TagAllocator allocator;
  return &allocator;
}

PagedStorage::PagedStorage(std::shared_ptr<PageOwner> owner, PageKind kind, std::size_t bytes, c10::Device device)
    : StorageImpl(use_byte_size_t(), bytes, c10::DataPtr(nullptr, device), tag(), /*resizable=*/false),
      owner_(std::move(owner)),
      kind_(kind) {}

void PagedStorage::fill(const at::Tensor& memory, std::int64_t offset) {
  clear_data_ptr_access_error_msg_();
  // Owning: a leaf or a view that a user keeps may outlive the engine.
  auto keeps = std::make_unique<at::Tensor>(memory);
  auto* data = is_without_memory(memory) ? nullptr : static_cast<char*>(memory.data_ptr()) + offset;
  set_data_ptr_noswap(c10::DataPtr(
      data, keeps.release(), [](void* kept) { delete static_cast<at::Tensor*>(kept); }, device()));
}

void PagedStorage::empty(const std::string& message) {
  set_data_ptr_noswap(c10::DataPtr(nullptr, device()));
  release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

std::vector<std::int64_t> dense_strides(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) {
    return tensor.strides().vec();
  }
  const auto strides = c10::contiguous_strides(tensor.sizes());
  return {strides.begin(), strides.end()};
}

at::Tensor tensor_on(
    const c10::Storage& storage, bool paged, c10::ScalarType dtype, std::int64_t offset, at::IntArrayRef sizes,
    at::IntArrayRef strides) {
  c10::DispatchKeySet keys(c10::computeDispatchKey(dtype, c10::kStrided, storage.device()));
  if (paged) {
    keys = keys.add(kPagedKey);
  }
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(storage), keys, c10::scalarTypeToTypeMeta(dtype));
  impl->set_sizes_and_strides(sizes, strides, offset);
  return at::Tensor(std::move(impl));
}

at::Tensor tensor_on(
    const c10::Storage& storage, bool paged, c10::ScalarType dtype, std::int64_t offset, at::IntArrayRef sizes) {
  return tensor_on(storage, paged, dtype, offset, sizes, c10::contiguous_strides(sizes));
}

} // namespace ebb::shard
