#include "offload.h"

#include "ebb/base/error.h"

#include <torch/torch.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <mutex>

namespace ebb::shard {
namespace {

namespace fs = std::filesystem;

std::string reason() {
  return std::strerror(errno);
}

} // namespace

/// A file without a name, of which each allocation maps a part of its own.
class Tier::File : public std::enable_shared_from_this<File> {
 public:
  File(const std::string& folder, std::string function) : folder_(folder), function_(std::move(function)) {
    descriptor_ = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (descriptor_ < 0) { // file systems without O_TMPFILE
      auto name = (fs::path(folder) / "ebb-offload-XXXXXX").string();
      descriptor_ = ::mkostemp(name.data(), O_CLOEXEC);
      TORCH_CHECK_VALUE(
          descriptor_ >= 0, "[", function_, "] offload: cannot make a file in '", folder, "': ", reason(),
          "; give OffloadPolicy::folder a folder that can be written");
      ::unlink(name.c_str());
    }
  }
  File(const File&) = delete;
  ~File() {
    ::close(descriptor_);
  }

  at::Tensor zeros(std::int64_t numel, c10::ScalarType dtype) {
    const auto options = at::TensorOptions().dtype(dtype);
    const auto bytes = numel * static_cast<std::int64_t>(c10::elementSize(dtype));
    if (bytes == 0) {
      return at::zeros({numel}, options);
    }
    const auto page = ::sysconf(_SC_PAGESIZE);
    const auto length = (bytes + page - 1) / page * page;
    std::int64_t offset = 0;
    {
      const std::lock_guard lock(mutex_);
      offset = end_;
      end_ += length;
    }
    // Reserves the blocks now: a disk that is full later would be a signal in the middle of an operator.
    const int error = ::posix_fallocate(descriptor_, offset, length);
    if (error != 0) {
      throw c10::OutOfMemoryError(
          c10::SourceLocation{__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)},
          c10::str(
              "[", function_, "] offload: cannot reserve ", bytes, " bytes more in '", folder_,
              "', where this rank has ", bytes_.load(), " already: ", std::strerror(error),
              "; free some disk, or name another OffloadPolicy::folder"));
    }
    void* data = ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, offset);
    TORCH_CHECK(data != MAP_FAILED, "[", function_, "] offload: cannot map ", bytes, " bytes: ", reason());
    bytes_ += bytes;
    return at::from_blob(
        data, {numel},
        [file = shared_from_this(), offset, length, bytes](void* mapped) {
          ::munmap(mapped, length);
          ::fallocate(file->descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, length);
          file->bytes_ -= bytes;
        },
        options);
  }
  std::int64_t bytes() const {
    return bytes_;
  }
  const std::string& folder() const {
    return folder_;
  }

 private:
  std::string folder_;
  std::string function_;
  int descriptor_ = -1;
  std::mutex mutex_;
  std::int64_t end_ = 0;
  std::atomic<std::int64_t> bytes_{0};
};

Tier::Tier(const OffloadPolicy& policy, c10::Device device, std::string function)
    : policy_(policy), pinned_bytes_(std::make_shared<std::int64_t>(0)) {
  if (policy.tier == OffloadTier::kFile) {
    file_ = std::make_shared<File>(
        policy.folder.empty() ? fs::temp_directory_path().string() : policy.folder, std::move(function));
  } else {
    TORCH_CHECK_VALUE(
        !device.is_cpu(), "[", function,
        "] offload: expected tensors on an accelerator for OffloadTier::kHost, got ones on the CPU, "
        "which are in host memory anyway; use OffloadTier::kFile");
  }
  copier_ = Copier::make(device, policy);
}

Tier::~Tier() = default;

at::Tensor Tier::zeros(std::int64_t numel, c10::ScalarType dtype) {
  if (file_) {
    return file_->zeros(numel, dtype);
  }
  const auto memory = at::zeros({numel}, at::TensorOptions().dtype(dtype).pinned_memory(true));
  *pinned_bytes_ += static_cast<std::int64_t>(memory.nbytes());
  return at::from_blob(
      memory.data_ptr(), {numel},
      [memory, total = pinned_bytes_](void*) { *total -= static_cast<std::int64_t>(memory.nbytes()); },
      memory.options());
}

std::int64_t Tier::bytes() const {
  return file_ ? file_->bytes() : *pinned_bytes_;
}

std::string Tier::describe() const {
  return file_ ? "a file in " + file_->folder() : "page-locked host memory";
}

} // namespace ebb::shard
