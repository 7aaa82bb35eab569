#include "ordered_sum.h"
#include "socket_communicator.h"

#include <algorithm>
#include <cstring>

namespace ebb::comm {

void SocketCommunicator::gather(SocketOperation& op, char* output, const char* input, std::int64_t bytes) {
  for (int i = 1; i < size(); ++i) {
    const int to = (rank() + i) % size();
    const int from = (rank() - i + size()) % size();
    receive(op, op.receives, output + from * bytes, bytes, from, kFirst);
    send(op, input, bytes, to, kFirst);
  }
  if (char* own = output + rank() * bytes; bytes > 0 && own != input) {
    std::memcpy(own, input, static_cast<std::size_t>(bytes));
  }
}

std::unique_ptr<Work> SocketCommunicator::all_gather(
    const at::Tensor& output, const at::Tensor& input, std::string_view unit) {
  check_all_gather(output, input, size(), c10::kCPU, unit);
  const auto bytes = static_cast<std::int64_t>(input.nbytes());
  auto operation = begin(Op::kAllGather, unit, input.scalar_type(), bytes, 0);
  count(Op::kAllGather, [bytes](int) { return bytes; });
  operation->kept = {output, input};
  return submit(std::move(operation), [&](SocketOperation& op) {
    gather(op, static_cast<char*>(output.mutable_data_ptr()), static_cast<const char*>(input.const_data_ptr()), bytes);
  });
}

std::unique_ptr<Work> SocketCommunicator::reduce_scatter(
    const at::Tensor& output, const at::Tensor& input, double divisor, std::string_view unit) {
  check_reduce_scatter(output, input, divisor, size(), c10::kCPU, unit);
  const auto bytes = static_cast<std::int64_t>(output.nbytes());
  auto operation = begin(Op::kReduceScatter, unit, input.scalar_type(), bytes * size(), 0);
  count(Op::kReduceScatter, [bytes](int) { return bytes; });
  operation->kept = {output, input};
  return submit(std::move(operation), [&](SocketOperation& op) {
    const auto* from = static_cast<const char*>(input.const_data_ptr());
    auto sources = exchange_chunks(op, from, [bytes](int r) { return std::pair{bytes * r, bytes * (r + 1)}; });
    op.finish = [out = output.mutable_data_ptr(), sources, n = static_cast<std::size_t>(output.numel()),
                 dtype = output.scalar_type(), divisor] {
      combine_in_order(out, sources.data(), static_cast<int>(sources.size()), n, dtype, ReduceOp::kSum, divisor);
    };
  });
}

// Sends each peer its chunk of `from` and receives theirs of this rank's chunk; the sources of the sum, in rank order.
std::vector<const void*> SocketCommunicator::exchange_chunks(
    SocketOperation& op, const char* from,
    const std::function<std::pair<std::int64_t, std::int64_t>(int rank)>& chunk) {
  const auto [begin, end] = chunk(rank());
  const auto bytes = end - begin;
  op.scratch = scratch_.take(static_cast<std::size_t>(bytes * (size() - 1)));
  std::vector<const void*> sources(size());
  sources[rank()] = from + begin;
  char* free_space = op.scratch.data();
  for (int i = 1; i < size(); ++i) {
    const int to = (rank() + i) % size();
    const int source = (rank() - i + size()) % size();
    sources[source] = free_space;
    receive(op, op.receives, free_space, bytes, source, kFirst);
    free_space += bytes;
    const auto [their_begin, their_end] = chunk(to);
    send(op, from + their_begin, their_end - their_begin, to, kFirst);
  }
  return sources;
}

std::unique_ptr<Work> SocketCommunicator::all_reduce(
    const at::Tensor& tensor, ReduceOp reduce, double divisor, std::string_view unit) {
  check_all_reduce(tensor, divisor, c10::kCPU, unit);
  const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
  auto operation = begin(Op::kAllReduce, unit, tensor.scalar_type(), bytes, static_cast<int>(reduce));
  operation->kept = {tensor};
  auto* data = static_cast<char*>(tensor.mutable_data_ptr());
  const auto dtype = tensor.scalar_type();
  if (bytes <= kOnePhaseBytes) {
    count(Op::kAllReduce, [bytes](int) { return bytes; });
    return submit(std::move(operation), [&](SocketOperation& op) {
      auto sources = exchange_chunks(op, data, [bytes](int) { return std::pair{std::int64_t{0}, bytes}; });
      op.finish = [this, &op, data, sources, n = static_cast<std::size_t>(tensor.numel()), dtype, reduce, divisor] {
        for (const auto& handle : op.sends) {
          transport_->wait(handle); // The sum overwrites what is sent.
        }
        op.sends.clear();
        combine_in_order(data, sources.data(), size(), n, dtype, reduce, divisor);
      };
    });
  }
  const auto chunk = [n = tensor.numel(), width = tensor.element_size(), world = size()](int r) {
    const auto [begin, end] = all_reduce_chunk(n, r, world);
    return std::pair{begin * width, end * width};
  };
  const auto [own_begin, own_end] = chunk(rank());
  count(Op::kAllReduce, [&, own = own_end - own_begin](int peer) {
    const auto [begin, end] = chunk(peer);
    return own + end - begin;
  });
  return submit(std::move(operation), [&, own_begin = own_begin, own_end = own_end](SocketOperation& op) {
    auto sources = exchange_chunks(op, data, chunk);
    for (int i = 1; i < size(); ++i) {
      // The owner of a chunk sends its sum only after it has all of this rank's part, so nothing is overwritten early.
      const int from = (rank() - i + size()) % size();
      const auto [begin, end] = chunk(from);
      receive(op, op.late_receives, data + begin, end - begin, from, kSecond);
    }
    const auto n = static_cast<std::size_t>((own_end - own_begin) / tensor.element_size());
    op.finish = [this, &op, data, own_begin, own_end, sources, n, dtype, reduce, divisor] {
      combine_in_order(data + own_begin, sources.data(), size(), n, dtype, reduce, divisor);
      for (int i = 1; i < size(); ++i) {
        send(op, data + own_begin, own_end - own_begin, (rank() + i) % size(), kSecond);
      }
      for (const auto& handle : op.late_receives) {
        transport_->wait(handle);
      }
    };
  });
}

// A binomial tree: the root sends log2(size) copies, not size - 1.
std::unique_ptr<Work> SocketCommunicator::broadcast(const at::Tensor& tensor, int root, std::string_view unit) {
  check_broadcast(tensor, root, size(), c10::kCPU, unit);
  const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
  auto operation = begin(Op::kBroadcast, unit, tensor.scalar_type(), bytes, root);
  operation->kept = {tensor};
  const int place = (rank() - root + size()) % size(); // in a tree whose root is at place 0
  int step = 1;
  while (step < size() && (place & step) == 0) {
    step <<= 1;
  }
  std::vector<int> children;
  for (int below = step >> 1; below > 0; below >>= 1) {
    if (place + below < size()) {
      children.push_back((place + below + root) % size());
    }
  }
  count(Op::kBroadcast, [&](int peer) {
    return std::find(children.begin(), children.end(), peer) != children.end() ? bytes : 0;
  });
  auto* data = static_cast<char*>(tensor.mutable_data_ptr());
  return submit(std::move(operation), [&](SocketOperation& op) {
    if (place != 0) {
      receive(op, op.receives, data, bytes, (place - step + root) % size(), kFirst);
    }
    op.finish = [this, &op, data, bytes, children] {
      for (const int child : children) {
        send(op, data, bytes, child, kFirst);
      }
    };
  });
}

} // namespace ebb::comm
