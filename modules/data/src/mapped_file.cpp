#include "ebb/data/mapped_file.h"

#include "ebb/base/error.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace ebb::data {
namespace {

struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) {
      ::close(fd);
    }
  }
};

} // namespace

MappedFile::MappedFile(std::string path) : path_(std::move(path)) {
  // O_NONBLOCK: opening a pipe that nobody writes to must fail below, not wait here.
  const Descriptor file{::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  TORCH_CHECK_VALUE(
      file.fd >= 0, "[MappedFile] cannot open '", path_, "': ", std::strerror(errno),
      "; check the path and its permissions");
  struct stat status {};
  TORCH_CHECK_VALUE(
      ::fstat(file.fd, &status) == 0, "[MappedFile] cannot read the size of '", path_, "': ", std::strerror(errno));
  TORCH_CHECK_VALUE(
      S_ISREG(status.st_mode), "[MappedFile] '", path_, "' is not a regular file; give the path of a file on disk");
  if (status.st_size == 0) {
    EBB_THROW(FormatError, "[MappedFile] '", path_, "' is empty; give a file that has text in it");
  }
  size_ = static_cast<std::size_t>(status.st_size);
  void* address = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.fd, 0);
  TORCH_CHECK_VALUE(
      address != MAP_FAILED, "[MappedFile] cannot map the ", size_, " bytes of '", path_, "': ", std::strerror(errno));
  address_ = address;
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      address_(std::exchange(other.address_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(address_, other.address_);
  std::swap(size_, other.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (address_) {
    ::munmap(address_, size_);
  }
}

} // namespace ebb::data
