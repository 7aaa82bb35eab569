#pragma once

#include <string>

namespace ebb::comm {

/// Passes what arrives in a pipe on to another file descriptor, by whole lines, so that the output of several processes
/// does not mix within a line.
class LinePipe {
 public:
  /// @param to     Where the lines go.
  /// @param clear  Put before each line: on a terminal, what wipes the progress bar that another process has drawn.
  LinePipe(int to, std::string clear);
  ~LinePipe();
  LinePipe(const LinePipe&) = delete;
  LinePipe& operator=(const LinePipe&) = delete;

  /// The end to give to the process; closed by close_writer() in this one.
  int writer() const {
    return writer_;
  }
  void close_writer();
  /// The end to poll; -1 after the end of the output.
  int reader() const {
    return reader_;
  }
  /// Passes on what there is without waiting for more.
  void pump();
  /// Passes on all that is left, also an unfinished line.
  void finish();
  int to() const {
    return to_;
  }
  /// Why lines were lost: errno of the first write that failed; 0 when none did, or only because nobody reads any more.
  int error() const {
    return error_;
  }

 private:
  void pass_on(std::size_t length);

  int to_;
  std::string clear_;
  int reader_ = -1;
  int writer_ = -1;
  int error_ = 0;
  std::string pending_;
};

} // namespace ebb::comm
