#include "socket_communicator.h"

#include "exchange.h"
#include "failure.h"
#include "ordered_sum.h"
#include "socket_operation.h"

#include "ebb/base/log.h"

#include <algorithm>

namespace ebb::comm {
namespace {

enum Phase { kHeader = 0, kFirst = 1, kSecond = 2 };

// Distinct for the operations in flight and their phases. The bytes are mixed in so that transfers of ranks that
// disagree never meet: Gloo ends the process where a message is longer than its receiver expects.
int tag_of(const Operation& operation, Phase phase) {
  std::uint64_t mixed =
      phase == kHeader ? 0 : static_cast<std::uint64_t>(operation.bytes) * 6 + static_cast<std::uint64_t>(operation.op);
  mixed *= 0x9E3779B97F4A7C15ULL;
  return static_cast<int>((operation.number & 0xffff) << 15 | static_cast<std::uint64_t>(phase) << 13 | mixed >> 51);
}

} // namespace

SocketCommunicator::SocketCommunicator(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const GroupOptions& options,
    std::shared_ptr<Health> health)
    : Communicator(rank, size), store_(store), options_(options), health_(std::move(health)) {
  capabilities_ = {
      .backend = "gloo",
      .all_gather = "direct send and receive",
      .reduce_scatter = "direct send and receive, sum in rank order",
      .cpu = true,
      .cuda = false,
      .lacks = {"CUDA tensors", "sums of float8, complex, bool and 8- and 16-bit integer tensors"}};
  transport_ = std::make_shared<SocketTransport>(store, rank, size, options.address);
  health_->add_on_break([transport = std::weak_ptr(transport_)](int /*rank*/, const std::string& /*why*/) {
    if (const auto alive = transport.lock()) {
      alive->shut();
    }
  });
  worker_ = std::thread([this] { run_operations(); });
}

SocketCommunicator::~SocketCommunicator() {
  const Operation leaving{.op = Op::kBarrier, .unit = "the end of the group", .step = step_};
  health_->drain(
      [this](std::chrono::milliseconds limit) {
        std::unique_lock lock(mutex_);
        return changed_.wait_for(lock, limit, [this] { return queue_.empty(); });
      },
      leaving);
  if (health_->broken()) {
    transport_->shut();
  }
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  worker_.join();
  health_->close();
  transport_.reset(); // Before what its transfers touch.
  abandoned_.clear();
}

const Capabilities& SocketCommunicator::capabilities() const {
  return capabilities_;
}

const Traffic& SocketCommunicator::traffic() const {
  return traffic_;
}

void SocketCommunicator::set_step(std::int64_t step) {
  step_ = step;
  health_->set_step(step);
}

void SocketCommunicator::abort() noexcept {
  health_->fail("it left the group by abort()");
  children_.abort();
}

std::shared_ptr<Communicator> SocketCommunicator::split(const std::vector<int>& ranks, const std::string& name) {
  return children_.split(store_, rank(), ranks, name, options_);
}

SocketCommunicator::OperationPtr SocketCommunicator::begin(
    Op op, std::string_view unit, c10::ScalarType dtype, std::int64_t bytes, int detail) {
  auto operation = std::make_shared<SocketOperation>();
  operation->info = {
      .op = op,
      .unit = std::string(unit),
      .step = step_,
      .number = next_number_,
      .dtype = dtype,
      .bytes = bytes,
      .detail = detail};
  health_->begin(operation->info);
  ++next_number_;
  operation->header = OperationHeader(operation->info);
  operation->peer_headers.resize(size());
  return operation;
}

void SocketCommunicator::send(SocketOperation& operation, const char* data, std::int64_t bytes, int peer, int phase) {
  if (bytes > 0) {
    operation.sends.push_back(transport_->send(
        data, static_cast<std::size_t>(bytes), peer, tag_of(operation.info, static_cast<Phase>(phase))));
  }
}

void SocketCommunicator::receive(
    SocketOperation& operation, std::vector<SocketTransport::Handle>& handles, char* data, std::int64_t bytes, int peer,
    int phase) {
  if (bytes > 0) {
    handles.push_back(transport_->receive(
        data, static_cast<std::size_t>(bytes), peer, tag_of(operation.info, static_cast<Phase>(phase))));
  }
}

// Starts the transfers of `operation` and hands it to the group's thread.
std::unique_ptr<Work> SocketCommunicator::submit(
    OperationPtr operation, const std::function<void(SocketOperation&)>& post) {
  try {
    auto& op = *operation;
    for (int i = 1; i < size(); ++i) {
      const int to = (rank() + i) % size();
      const int from = (rank() - i + size()) % size();
      op.header_receives.push_back(
          transport_->receive(&op.peer_headers[from], sizeof(OperationHeader), from, tag_of(op.info, kHeader)));
      op.header_sends.push_back(transport_->send(&op.header, sizeof(OperationHeader), to, tag_of(op.info, kHeader)));
    }
    post(op);
  } catch (const std::exception& error) {
    {
      const std::lock_guard lock(mutex_);
      abandoned_.push_back(operation);
    }
    health_->break_group(-1, message_of(error));
    health_->throw_broken(operation->info);
  }
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(operation);
  }
  changed_.notify_all();
  return std::make_unique<SocketWork>(std::move(operation), health_);
}

void SocketCommunicator::run_operations() {
  log::set_rank(rank());
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) {
      return;
    }
    const auto operation = queue_.front();
    lock.unlock();
    run(operation);
    lock.lock();
    queue_.pop_front();
    changed_.notify_all();
  }
}

void SocketCommunicator::run(const OperationPtr& operation) {
  auto& op = *operation;
  bool failed = false;
  std::exception_ptr error;
  try {
    for (const auto& handle : op.header_receives) {
      transport_->wait(handle);
    }
    for (const auto& handle : op.header_sends) {
      transport_->wait(handle); // Before any complaint, so that the others can complain too.
    }
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank() && !op.header.agrees_with(op.peer_headers[peer])) {
        throw_mismatch(op.info, rank(), peer, op.header, op.peer_headers[peer]);
      }
    }
    for (const auto& handle : op.receives) {
      transport_->wait(handle);
    }
    if (op.finish) {
      op.finish();
    }
    for (const auto& handle : op.sends) {
      transport_->wait(handle);
    }
  } catch (const c10::ValueError& mismatch) {
    failed = true;
    error = std::current_exception();
    health_->fail(message_of(mismatch));
  } catch (const std::exception& broken) {
    failed = true;
    health_->break_group(-1, message_of(broken));
  }
  op.finish = nullptr;
  if (failed) {
    const std::lock_guard lock(mutex_);
    abandoned_.push_back(operation);
  } else {
    scratch_.give(std::move(op.scratch));
    op.kept.clear();
  }
  {
    const std::lock_guard lock(op.mutex);
    op.ended = true;
    op.failed = failed;
    op.error = error;
  }
  op.ended_changed.notify_all();
}

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
  count(Op::kAllGather, bytes * (size() - 1));
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
  count(Op::kReduceScatter, bytes * (size() - 1));
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
  count(Op::kAllReduce, all_reduce_bytes(tensor.numel(), tensor.element_size(), rank(), size()));
  if (bytes <= kOnePhaseBytes) {
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
  count(Op::kBroadcast, bytes * static_cast<std::int64_t>(children.size()));
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

void SocketCommunicator::barrier() {
  auto operation = begin(Op::kBarrier, "", c10::kByte, 0, 0);
  count(Op::kBarrier, 0);
  submit(std::move(operation), [](SocketOperation&) {})->wait();
}

std::vector<std::string> SocketCommunicator::exchange(const std::string& mine) {
  check_exchange(mine);
  const auto gather_now = [this](const Bytes& output, const Bytes& input) {
    auto operation = begin(Op::kExchange, "", c10::kByte, static_cast<std::int64_t>(input->size()), 0);
    operation->kept_bytes = {output, input};
    submit(std::move(operation), [&](SocketOperation& op) {
      gather(op, output->data(), input->data(), static_cast<std::int64_t>(input->size()));
    })->wait();
  };
  auto texts = exchange_by(gather_now, mine, size());
  count(Op::kExchange, static_cast<std::int64_t>(mine.size()) * (size() - 1));
  return texts;
}

void SocketCommunicator::count(Op op, std::int64_t bytes) {
  ++traffic_.calls[static_cast<std::size_t>(op)];
  traffic_.bytes_sent[static_cast<std::size_t>(op)] += bytes;
}

} // namespace ebb::comm
