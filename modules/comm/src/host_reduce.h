#pragma once

#include "host_messages.h"
#include "scratch_pool.h"

#include "ebb/comm/communicator.h"

#include <vector>

namespace ebb::comm {

// Note [Sums along a chain of hosts]
// Sums must be ((g0 + g1) + g2) + ... in rank order, so a host cannot add its own ranks' parts first: (g0 + g1) + (g2 +
// g3) has other bits. But where every host's ranks are neighbours, one partial sum can go from host to host in rank
// order: at each, the carrier of the rail takes it, adds the parts of its host's ranks to it, and passes it on. The last
// host divides. What crosses between two hosts is one partial sum, however many ranks they have; half types cross as
// float, since they are rounded once, at the end.
//
// A tensor goes in pieces, the rails taking turns, so that all hosts add at the same time, each another piece.
// Reduce-scatter: the last host sends each result to its owner. All-reduce: results go back along the chain, and each
// carrier shares its own with its host.

/// The chain, up to the results.
class HostReduce : public HostOperation {
 public:
  struct Given {
    const char* input;
    c10::ScalarType dtype;
    ReduceOp reduce;
    double divisor;
  };

  void post() final;

 protected:
  struct Task {
    Piece piece; ///< Of the input.
    int rail = 0;
  };

  HostReduce(std::unique_ptr<HostMessages> messages, SocketOperation& operation, ScratchPool& pool, const Given& given);

  /// In the order in which all hosts work. Called by the constructors of the two below.
  void set_tasks(std::vector<Task> tasks);
  /// Called by post(): receives results, and counts what finish() will send.
  virtual void post_results() = 0;
  /// Where the result of a task is to be, at the last host; nullptr: anywhere.
  virtual char* place_of_result(std::size_t task) = 0;

  const std::vector<Task>& tasks() const {
    return tasks_;
  }
  bool is_own(std::size_t task) {
    return carrier(task, messages().host()) == messages().rank();
  }
  int carrier(std::size_t task, int host) {
    return messages().layout().carrier(host, tasks_[task].rail);
  }
  bool is_first() {
    return messages().host() == 0;
  }
  bool is_last() {
    return messages().host() == messages().layout().num_hosts() - 1;
  }
  std::int64_t bytes_of(std::size_t task) const {
    return tasks_[task].piece.count * width_;
  }
  /// Adds this host's parts of a task of this rank to the sum, and passes it on.
  /// @return  At the last host: the result, divided, in the input's dtype.
  const char* fold(std::size_t task);

  const std::int64_t width_; ///< Bytes of an element.

 private:
  struct Fold {
    char* sum = nullptr; ///< Received from the host before; then this host's.
    char* result = nullptr;
    HostMessages::Incoming partial;
    std::vector<HostMessages::Incoming> parts; ///< Of the mates.
  };

  std::int64_t lay_out(char* memory);
  const void* widened(const void* part, std::int64_t count, std::size_t slot);

  SocketOperation& operation_;
  ScratchPool& pool_;
  const Given given_;
  const c10::ScalarType sum_dtype_;
  const std::int64_t sum_width_;
  std::vector<Task> tasks_;
  std::vector<Fold> folds_; ///< By task; empty for those of other carriers.
  std::vector<std::vector<float>> wide_; ///< Parts of half types, by place in the sum.
  std::vector<const void*> sources_;
};

class HostReduceScatter final : public HostReduce {
 public:
  HostReduceScatter(
      std::unique_ptr<HostMessages> messages, SocketOperation& operation, ScratchPool& pool, const Given& given,
      char* output, std::int64_t count);
  void finish() override;

 private:
  void post_results() override;
  char* place_of_result(std::size_t task) override;

  char* const output_;
  const std::int64_t count_; ///< Elements of a rank's part.
  std::vector<HostMessages::Incoming> results_;
};

class HostAllReduce final : public HostReduce {
 public:
  HostAllReduce(
      std::unique_ptr<HostMessages> messages, SocketOperation& operation, ScratchPool& pool, const Given& given,
      char* tensor, std::int64_t count);
  void finish() override;

 private:
  void post_results() override;
  char* place_of_result(std::size_t task) override;
  void hand_back(std::size_t task);

  char* const tensor_;
  std::vector<HostMessages::Incoming> results_; ///< By task. Empty where this rank makes it.
};

} // namespace ebb::comm
