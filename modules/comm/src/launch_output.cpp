#include "launch_output.h"

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

namespace ebb::comm {
namespace {

constexpr std::size_t kLongestLine = 1 << 16; // longer ones are passed on in parts

// What cannot be written is dropped; the ranks go on. Returns why, 0 when nothing was or the reader has left.
int write_all(int fd, const std::string& text) {
  std::size_t done = 0;
  while (done < text.size()) {
    const auto count = ::write(fd, text.data() + done, text.size() - done);
    if (count < 0 && errno != EINTR) {
      return errno == EPIPE ? 0 : errno;
    }
    done += count > 0 ? static_cast<std::size_t>(count) : 0;
  }
  return 0;
}

} // namespace

LinePipe::LinePipe(int to, std::string clear) : to_(to), clear_(std::move(clear)) {
  std::array<int, 2> ends{};
  TORCH_CHECK(::pipe2(ends.data(), O_CLOEXEC) == 0, "[launch_local_ranks] cannot make a pipe: ", std::strerror(errno));
  reader_ = ends[0];
  writer_ = ends[1];
  ::fcntl(reader_, F_SETFL, O_NONBLOCK);
}

LinePipe::~LinePipe() {
  close_writer();
  if (reader_ >= 0) {
    ::close(reader_);
  }
}

void LinePipe::close_writer() {
  if (writer_ >= 0) {
    ::close(writer_);
    writer_ = -1;
  }
}

void LinePipe::pump() {
  std::array<char, 1 << 14> buffer{};
  while (reader_ >= 0) {
    const auto count = ::read(reader_, buffer.data(), buffer.size());
    if (count < 0) {
      if (errno == EINTR) {
        continue;
      }
      return; // nothing there for now
    }
    if (count == 0) {
      ::close(reader_);
      reader_ = -1;
      return;
    }
    pending_.append(buffer.data(), static_cast<std::size_t>(count));
    const auto last = pending_.rfind('\n');
    if (last != std::string::npos) {
      pass_on(last + 1);
    } else if (pending_.size() > kLongestLine) {
      pass_on(pending_.size());
    }
  }
}

void LinePipe::finish() {
  pump();
  if (!pending_.empty()) {
    pending_ += '\n';
    pass_on(pending_.size());
  }
}

void LinePipe::pass_on(std::size_t length) {
  const int error = write_all(to_, clear_ + pending_.substr(0, length));
  error_ = error_ != 0 ? error_ : error;
  pending_.erase(0, length);
}

} // namespace ebb::comm
