#pragma once

#include "ebb/comm/work.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace ebb::comm {

/// What ranks do together.
enum class Op { kAllGather, kReduceScatter, kAllReduce, kBroadcast, kBarrier, kExchange };
inline constexpr int kNumOps = 6;
/// "all_gather", "reduce_scatter", ...
std::string_view name_of(Op op);

/// How all_reduce() combines.
enum class ReduceOp { kSum, kMax };

/// What this rank has put on the wire since the group was made. A rank of a group of one sends nothing.
struct Traffic {
  std::array<std::int64_t, kNumOps> calls{}; ///< Indexed by Op. Calls in a group of one count too.
  std::array<std::int64_t, kNumOps> bytes_sent{}; ///< Payload handed to other ranks, by this rank.
  /// Of bytes_sent, what goes to ranks on other hosts. Backend "nccl" does not know, and leaves it 0.
  std::array<std::int64_t, kNumOps> bytes_across_hosts{};
  std::int64_t total_bytes_sent() const;
  std::int64_t total_bytes_across_hosts() const;
  /// Calls of one kind.
  std::int64_t calls_of(Op op) const {
    return calls[static_cast<std::size_t>(op)];
  }
};

/// What a backend can do; what it lacks is named at start-up.
struct Capabilities {
  std::string backend; ///< "single", "gloo", "nccl"
  std::string all_gather; ///< Algorithm: "native", "direct send and receive", "read peers' memory", "hierarchical: ..."
  std::string reduce_scatter;
  bool cpu = false;
  bool cuda = false;
  std::vector<std::string> lacks; ///< One clause each: "float8 tensors", ...
};

/// Collectives over one group of ranks.
///
/// Every method that returns Work, and exchange() and barrier(), is collective: all ranks call it, in the same order,
/// with tensors of the same size and dtype. Tensors must be contiguous and on a device that the backend serves. The
/// caller keeps inputs unchanged until Work::release() and outputs unread until Work::wait(); tensors that are both, of
/// all_reduce and broadcast, are the caller's again after Work::wait().
///
/// Exactness: on CPU backends sums are taken in rank order, ((g0 + g1) + g2) + ..., in the tensor's dtype (float for
/// half types), then divided once: the same bits at every rank and with every algorithm. NCCL sums in its own order.
///
/// `unit` names the operation's subject in logs and errors.
class Communicator {
 public:
  virtual ~Communicator() = default;

  int rank() const {
    return rank_;
  }
  int size() const {
    return size_;
  }
  virtual const Capabilities& capabilities() const = 0;

  /// Fills `output`, size() times the elements of `input`, with the inputs in rank order. `input` may be this rank's own
  /// part of `output`. Cost: each rank sends (size - 1) inputs.
  virtual std::unique_ptr<Work> all_gather(
      const at::Tensor& output, const at::Tensor& input, std::string_view unit) = 0;

  /// Sums the inputs, divides by `divisor`, and leaves this rank's part, input / size() elements, in `output`.
  /// Cost: each rank sends (size - 1) / size of an input.
  virtual std::unique_ptr<Work> reduce_scatter(
      const at::Tensor& output, const at::Tensor& input, double divisor, std::string_view unit) = 0;

  /// Sums (or takes the maximum) in place and divides by `divisor`. Any number of elements.
  virtual std::unique_ptr<Work> all_reduce(
      const at::Tensor& tensor, ReduceOp op, double divisor, std::string_view unit) = 0;

  /// Copies `root`'s tensor to every rank.
  virtual std::unique_ptr<Work> broadcast(const at::Tensor& tensor, int root, std::string_view unit) = 0;

  /// Returns when every rank has called it.
  virtual void barrier() = 0;

  /// Everybody's text, in rank order. For small control messages (at most 1 MB each), not for tensors.
  virtual std::vector<std::string> exchange(const std::string& mine) = 0;

  /// Cuts this rank out of the group: running and later operations here throw, and so do those of the peers that wait
  /// for this rank. Safe from any thread, and more than once. For a rank that fails.
  virtual void abort() noexcept = 0;

  /// The step that errors and logs name. Set by the training loop.
  virtual void set_step(std::int64_t step) = 0;

  /// Counts since the group was made.
  virtual const Traffic& traffic() const = 0;

 protected:
  Communicator(int rank, int size) : rank_(rank), size_(size) {}

  /// A group of some of this group's ranks, for Mesh. Collective over `ranks` (ascending, this rank among them);
  /// `name` is the same at these ranks and differs from that of any other group split off.
  virtual std::shared_ptr<Communicator> split(const std::vector<int>& ranks, const std::string& name);
  friend class Mesh;

 private:
  int rank_;
  int size_;
};

} // namespace ebb::comm
