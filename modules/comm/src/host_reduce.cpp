#include "host_reduce.h"

#include "ordered_sum.h"

#include <c10/core/ScalarType.h>

#include <algorithm>

namespace ebb::comm {
namespace {

std::int64_t bytes_per_element(c10::ScalarType dtype) {
  return static_cast<std::int64_t>(c10::elementSize(dtype));
}

} // namespace

HostReduce::HostReduce(
    std::unique_ptr<HostMessages> messages, SocketOperation& operation, ScratchPool& pool, const Given& given)
    : HostOperation(std::move(messages)),
      width_(bytes_per_element(given.dtype)),
      operation_(operation),
      pool_(pool),
      given_(given),
      sum_dtype_(sum_dtype_of(given.dtype)),
      sum_width_(bytes_per_element(sum_dtype_)) {}

void HostReduce::set_tasks(std::vector<Task> tasks) {
  tasks_ = std::move(tasks);
}

// Places the buffers of all folds from `memory` on, or only adds up what they need.
std::int64_t HostReduce::lay_out(char* memory) {
  auto& net = messages();
  std::int64_t used = 0;
  const auto take = [&](std::int64_t bytes) {
    char* place = memory == nullptr ? nullptr : memory + used;
    used += (bytes + 63) & ~std::int64_t{63};
    return place;
  };
  std::int64_t longest = 0;
  for (std::size_t i = 0; i < tasks_.size(); ++i) {
    longest = std::max(longest, bytes_of(i));
  }
  std::vector<char*> shared; // What is read is read when its turn has come, one piece at a time.
  for (const int mate : net.mates()) {
    shared.push_back(net.reads(mate) ? take(longest) : nullptr);
  }
  for (std::size_t i = 0; i < tasks_.size(); ++i) {
    if (!is_own(i)) {
      continue;
    }
    auto& fold = folds_[i];
    fold.sum = take(tasks_[i].piece.count * sum_width_);
    fold.result = is_last() ? place_of_result(i) : nullptr;
    if (is_last() && fold.result == nullptr) {
      fold.result = sum_dtype_ == given_.dtype ? fold.sum : take(bytes_of(i));
    }
    fold.parts.resize(net.mates().size());
    for (std::size_t m = 0; m < net.mates().size(); ++m) {
      fold.parts[m].to = net.reads(net.mates()[m]) ? shared[m] : take(bytes_of(i));
    }
  }
  return used;
}

void HostReduce::post() {
  auto& net = messages();
  folds_.resize(tasks_.size());
  operation_.scratch = pool_.take(static_cast<std::size_t>(lay_out(nullptr)));
  lay_out(operation_.scratch.data());
  for (std::size_t i = 0; i < tasks_.size(); ++i) {
    auto& fold = folds_[i];
    const auto bytes = bytes_of(i);
    if (!is_own(i)) {
      const int to = carrier(i, net.host());
      net.send(given_.input + tasks_[i].piece.begin * width_, bytes, to, kRaw);
      net.count(bytes, to);
      continue;
    }
    for (std::size_t m = 0; m < fold.parts.size(); ++m) {
      fold.parts[m] = net.receive(fold.parts[m].to, bytes, net.mates()[m], kRaw);
    }
    const auto sum_bytes = tasks_[i].piece.count * sum_width_;
    if (!is_first()) {
      fold.partial = net.receive(fold.sum, sum_bytes, carrier(i, net.host() - 1), kAcross);
    }
    if (!is_last()) {
      net.count(sum_bytes, carrier(i, net.host() + 1));
    }
  }
  post_results();
}

const void* HostReduce::widened(const void* part, std::int64_t count, std::size_t slot) {
  if (sum_dtype_ == given_.dtype) {
    return part;
  }
  if (wide_.size() <= slot) {
    wide_.resize(slot + 1);
  }
  auto& wide = wide_[slot];
  wide.resize(std::max(wide.size(), static_cast<std::size_t>(count)));
  widen_halves(wide.data(), part, static_cast<std::size_t>(count), given_.dtype);
  return wide.data();
}

const char* HostReduce::fold(std::size_t task) {
  auto& net = messages();
  auto& state = folds_[task];
  const auto [begin, count] = tasks_[task].piece;
  sources_.clear();
  for (const auto& part : state.parts) {
    net.wait(part);
  }
  if (!is_first()) {
    net.wait(state.partial);
    sources_.push_back(state.sum);
  }
  std::size_t mate = 0;
  for (const int rank : net.layout().ranks_of(net.host())) {
    const void* part = rank == net.rank() ? given_.input + begin * width_ : state.parts[mate++].to;
    sources_.push_back(widened(part, count, sources_.size()));
  }
  const bool direct = is_last() && sum_dtype_ == given_.dtype;
  combine_in_order(
      direct ? state.result : state.sum, sources_.data(), static_cast<int>(sources_.size()),
      static_cast<std::size_t>(count), sum_dtype_, given_.reduce, is_last() ? given_.divisor : 1);
  if (!is_last()) {
    net.send(state.sum, count * sum_width_, carrier(task, net.host() + 1), kAcross);
    return nullptr;
  }
  if (!direct) {
    narrow_to_halves(
        state.result, reinterpret_cast<const float*>(state.sum), static_cast<std::size_t>(count), given_.dtype);
  }
  return state.result;
}

HostReduceScatter::HostReduceScatter(
    std::unique_ptr<HostMessages> messages, SocketOperation& operation, ScratchPool& pool, const Given& given,
    char* output, std::int64_t count)
    : HostReduce(std::move(messages), operation, pool, given), output_(output), count_(count) {
  const auto& layout = this->messages().layout();
  std::vector<Task> tasks;
  for (const auto& piece : pieces_of(count, width_, 1)) {
    for (int owner = 0; owner < layout.size(); ++owner) {
      tasks.push_back({{owner * count + piece.begin, piece.count}, layout.local_index(owner)});
    }
  }
  set_tasks(std::move(tasks));
}

char* HostReduceScatter::place_of_result(std::size_t task) {
  const auto begin = tasks()[task].piece.begin;
  const auto own_begin = messages().rank() * count_;
  return begin / count_ == messages().rank() ? output_ + (begin - own_begin) * width_ : nullptr;
}

void HostReduceScatter::post_results() {
  auto& net = messages();
  const auto& layout = net.layout();
  for (std::size_t i = 0; i < tasks().size(); ++i) {
    const auto owner = static_cast<int>(tasks()[i].piece.begin / count_);
    if (owner == net.rank() && !is_last()) {
      const int from = carrier(i, layout.num_hosts() - 1);
      char* to = output_ + (tasks()[i].piece.begin - owner * count_) * width_;
      results_.push_back(net.receive(to, bytes_of(i), from, kBack));
    } else if (owner != net.rank() && is_last() && is_own(i)) {
      net.count(bytes_of(i), owner);
    }
  }
}

void HostReduceScatter::finish() {
  auto& net = messages();
  for (std::size_t i = 0; i < tasks().size(); ++i) {
    if (!is_own(i)) {
      continue;
    }
    const char* result = fold(i);
    const auto owner = static_cast<int>(tasks()[i].piece.begin / count_);
    if (is_last() && owner != net.rank()) {
      net.send(result, bytes_of(i), owner, kBack);
    }
  }
  for (const auto& result : results_) {
    net.wait(result);
  }
  net.close();
}

HostAllReduce::HostAllReduce(
    std::unique_ptr<HostMessages> messages, SocketOperation& operation, ScratchPool& pool, const Given& given,
    char* tensor, std::int64_t count)
    : HostReduce(std::move(messages), operation, pool, given), tensor_(tensor) {
  const int rails = this->messages().layout().num_rails();
  std::vector<Task> tasks;
  for (const auto& piece : pieces_of(count, width_, rails)) {
    tasks.push_back({piece, static_cast<int>(tasks.size()) % rails});
  }
  set_tasks(std::move(tasks));
}

char* HostAllReduce::place_of_result(std::size_t task) {
  return tensor_ + tasks()[task].piece.begin * width_;
}

void HostAllReduce::post_results() {
  auto& net = messages();
  results_.resize(tasks().size());
  for (std::size_t i = 0; i < tasks().size(); ++i) {
    const auto bytes = bytes_of(i);
    if (!is_own(i)) {
      results_[i] = net.receive(place_of_result(i), bytes, carrier(i, net.host()), kWithin);
      continue;
    }
    if (!is_last()) {
      results_[i] = net.receive(place_of_result(i), bytes, carrier(i, net.host() + 1), kBack);
    }
    if (!is_first()) {
      net.count(bytes, carrier(i, net.host() - 1));
    }
    for (const int mate : net.mates()) {
      net.count(bytes, mate);
    }
  }
}

// Receives the result of a task, or has made it, and hands it to whom it is due.
void HostAllReduce::hand_back(std::size_t task) {
  auto& net = messages();
  if (!is_own(task) || !is_last()) {
    net.wait(results_[task]);
  }
  if (!is_own(task)) {
    return;
  }
  const char* result = place_of_result(task);
  if (!is_first()) {
    net.send(result, bytes_of(task), carrier(task, net.host() - 1), kBack);
  }
  for (const int mate : net.mates()) {
    net.send(result, bytes_of(task), mate, kWithin);
  }
}

// Results are waited for some pieces later than they could come, so that adding goes on meanwhile. No two ranks wait for
// each other: what a result needs of another host is done there in an earlier round, since the lag falls along the chain
// and is zero at its end.
void HostAllReduce::finish() {
  auto& net = messages();
  const auto& layout = net.layout();
  const auto hops = static_cast<std::size_t>(layout.num_hosts() - 1 - net.host());
  const auto lag = 2 * hops * static_cast<std::size_t>(layout.num_rails());
  for (std::size_t round = 0; round < tasks().size() + lag; ++round) {
    if (round < tasks().size() && is_own(round)) {
      fold(round);
    }
    if (round >= lag) {
      hand_back(round - lag);
    }
  }
  net.close();
}

} // namespace ebb::comm
