#include "socket_communicator.h"

#include "exchange.h"
#include "failure.h"

#include "ebb/base/log.h"

namespace ebb::comm {
SocketCommunicator::SocketCommunicator(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const GroupOptions& options,
    std::shared_ptr<Health> health, HostLayout layout)
    : Communicator(rank, size),
      layout_(std::move(layout)),
      health_(std::move(health)),
      store_(store),
      options_(options) {
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
  leave();
}

void SocketCommunicator::leave() {
  if (!worker_.joinable()) {
    return;
  }
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

void SocketCommunicator::send(
    SocketOperation& operation, const char* data, std::int64_t bytes, int peer, Stream stream) {
  if (bytes > 0) {
    operation.sends.push_back(
        transport_->send(data, static_cast<std::size_t>(bytes), peer, tag_of(operation.info, stream)));
  }
}

void SocketCommunicator::receive(
    SocketOperation& operation, std::vector<SocketTransport::Handle>& handles, char* data, std::int64_t bytes, int peer,
    Stream stream) {
  if (bytes > 0) {
    handles.push_back(transport_->receive(data, static_cast<std::size_t>(bytes), peer, tag_of(operation.info, stream)));
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
    op.plan.reset();
  }
  {
    const std::lock_guard lock(op.mutex);
    op.ended = true;
    op.failed = failed;
    op.error = error;
  }
  op.ended_changed.notify_all();
}

void SocketCommunicator::barrier() {
  auto operation = begin(Op::kBarrier, "", c10::kByte, 0, 0);
  count(Op::kBarrier, 0, 0);
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
  count(Op::kExchange, [bytes = static_cast<std::int64_t>(mine.size())](int) { return bytes; });
  return texts;
}

void SocketCommunicator::count(Op op, const std::function<std::int64_t(int peer)>& bytes_to) {
  std::int64_t total = 0;
  std::int64_t across = 0;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) {
      const auto bytes = bytes_to(peer);
      total += bytes;
      across += layout_.share_host(rank(), peer) ? 0 : bytes;
    }
  }
  count(op, total, across);
}

void SocketCommunicator::count(Op op, std::int64_t total, std::int64_t across) {
  ++traffic_.calls[static_cast<std::size_t>(op)];
  traffic_.bytes_sent[static_cast<std::size_t>(op)] += total;
  traffic_.bytes_across_hosts[static_cast<std::size_t>(op)] += across;
}

} // namespace ebb::comm
