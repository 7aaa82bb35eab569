#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace ebb::data {

/// A regular file mapped read-only into memory. Pages are read when they are touched and shared between processes.
///
/// The file must not shrink while it is mapped: the operating system answers a read beyond its new end with SIGBUS.
class MappedFile {
 public:
  /// @throws ValueError when `path` cannot be opened or is not a regular file; FormatError when it is empty.
  explicit MappedFile(std::string path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  const std::string& path() const {
    return path_;
  }
  std::span<const std::uint8_t> bytes() const {
    return {static_cast<const std::uint8_t*>(address_), size_};
  }

 private:
  std::string path_;
  void* address_ = nullptr;
  std::size_t size_ = 0;
};

} // namespace ebb::data
