#include "recording.h"

#include "op_kind.h"
#include "op_results.h"

#include <torch/torch.h>

#include <algorithm>
#include <functional>

namespace ebb::shard {
namespace {

// The same tensor as it is now; later changes of its shape or data do not reach it.
at::Tensor snapshot(const at::Tensor& tensor) {
  return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true));
}

bool covers_its_storage(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() &&
         static_cast<std::size_t>(tensor.nbytes()) == tensor.storage().nbytes();
}

bool all_small(const torch::jit::Stack& values) {
  bool small = true;
  for (const auto& value : values) {
    for_each_tensor(value, [&](const at::Tensor& tensor) { small = small && tensor.numel() <= kSmallNumel; });
  }
  return small;
}

c10::Device device_of(const std::vector<c10::IValue>& inputs) {
  c10::Device device = c10::kCPU;
  for (const auto& input : inputs) {
    for_each_tensor(input, [&](const at::Tensor& tensor) { device = tensor.is_cpu() ? device : tensor.device(); });
  }
  return device;
}

} // namespace

Recording::~Recording() {
  for (auto& [storage, pending] : pending_) {
    if (!pending.made_here && pending.aside) {
      storage->clear_data_ptr_access_error_msg_();
      storage->set_data_ptr_noswap(std::move(pending.aside));
    }
  }
}

bool Recording::pending(const at::Tensor& tensor) const {
  return pending_.contains(storage_of(tensor));
}

void Recording::call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto inputs = inputs_of(op, *stack);
  const auto kind = kind_of(op, device_of(inputs).type());
  if (kind == OpKind::kThrough) {
    op.redispatchBoxed(keys, stack);
    return;
  }
  const c10::impl::ExcludeDispatchKeyGuard no_mode(kRecordKey); // what runs inside an operator is part of it
  switch (kind) {
    case OpKind::kEmpty:
      make_empty(op, inputs, stack);
      return;
    case OpKind::kMakes:
      make(op, inputs, stack);
      return;
    case OpKind::kWrites:
      write(op, inputs, stack);
      return;
    default:
      for (const auto& input : inputs) {
        for_each_tensor(input, [&](const at::Tensor& tensor) {
          TORCH_CHECK_NOT_IMPLEMENTED(
              !pending(tensor), "[deferred_init] the constructor used ", op.schema().name(),
              ", which reads values that are not there yet; build this model directly");
        });
      }
      op.callBoxed(stack);
  }
}

void Recording::make_empty(
    const c10::OperatorHandle& op, const std::vector<c10::IValue>& inputs, torch::jit::Stack* stack) {
  const auto& asked = inputs[*index_of(op, "device")];
  const auto device = asked.isNone() ? at::Device(at::kCPU) : asked.toDevice();
  const auto like = results_like(op, inputs);
  if (device.is_meta() || !like || all_small(*like)) {
    op.callBoxed(stack);
    const auto& made = stack->back().toTensor();
    if (!device.is_meta()) {
      small_.emplace(storage_of(made), made.storage());
    }
    return;
  }
  torch::jit::drop(*stack, inputs.size());
  stack->emplace_back(without_memory(like->back().toTensor(), device));
}

void Recording::make(const c10::OperatorHandle& op, const std::vector<c10::IValue>& inputs, torch::jit::Stack* stack) {
  bool needs_values = is_random(op);
  for (const auto& input : inputs) {
    for_each_tensor(input, [&](const at::Tensor& tensor) { needs_values = needs_values || pending(tensor); });
  }
  const auto results = results_like(op, inputs);
  if (!needs_values && all_small(results ? *results : inputs)) {
    op.callBoxed(stack);
    for (auto value = stack->end() - static_cast<std::ptrdiff_t>(op.schema().returns().size()); value != stack->end();
         ++value) {
      for_each_tensor(*value, [&](const at::Tensor& made) { small_.emplace(storage_of(made), made.storage()); });
    }
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      results, "[deferred_init] the constructor used ", op.schema().name(),
      ", whose result has a shape that LibTorch cannot tell without values; build this model directly");
  std::vector<at::Tensor> outputs;
  torch::jit::drop(*stack, inputs.size());
  for (const auto& result : *results) {
    stack->push_back(with_tensors(
        result, [&](const at::Tensor& like) { return outputs.emplace_back(without_memory(like, device_of(inputs))); }));
  }
  note(op, inputs, std::move(outputs));
}

void Recording::write(const c10::OperatorHandle& op, const std::vector<c10::IValue>& inputs, torch::jit::Stack* stack) {
  const auto written = written_of(op, inputs);
  bool now = !is_random(op);
  for (const auto& input : inputs) {
    for_each_tensor(input, [&](const at::Tensor& tensor) { now = now && !pending(tensor); });
  }
  for (const auto& tensor : written) {
    now = now && !read_.contains(storage_of(tensor)); // a call to come reads what it had
  }
  std::optional<torch::jit::Stack> results;
  if (is_out(op)) {
    results = results_like(op, inputs);
    now = now && (!results || all_small(*results));
  }
  if (now) {
    op.callBoxed(stack);
    return;
  }
  for (std::size_t i = 0; results && i < written.size() && i < results->size(); ++i) {
    const auto& like = (*results)[i].toTensor();
    if (written[i].sizes() != like.sizes()) { // it will have been resized
      put_aside(written[i], small_.contains(storage_of(written[i])));
      pending_.at(storage_of(written[i])).aside.clear();
      written[i].unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
      storage_of(written[i])->set_nbytes(std::max(like.nbytes(), written[i].storage().nbytes()));
    }
  }
  for (const auto& tensor : written) {
    put_aside(tensor, small_.contains(storage_of(tensor)));
  }
  note(op, inputs, {});
  torch::jit::drop(*stack, inputs.size());
  for (std::size_t i = 0; i < op.schema().returns().size(); ++i) {
    stack->emplace_back(written.at(i));
  }
}

void Recording::note(
    const c10::OperatorHandle& op, const std::vector<c10::IValue>& inputs, std::vector<at::Tensor> outputs) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !is_random(op) || index_of(op, "generator"), "[deferred_init] the constructor used ", op.schema().name(),
      ", which draws random numbers and takes no generator; build this model directly");
  Call call{.op = op, .inputs = {}, .outputs = {}, .read = {}, .overwrites = false};
  for (const auto& input : inputs) {
    call.inputs.push_back(with_tensors(input, [&](const at::Tensor& tensor) {
      if (small_.contains(storage_of(tensor))) {
        put_aside(tensor, true);
      }
      if (pending(tensor)) {
        return snapshot(tensor);
      }
      read_.insert(storage_of(tensor));
      call.read.emplace_back(tensor, tensor.is_inference() ? 0 : tensor._version());
      return tensor;
    }));
  }
  for (const auto& output : outputs) {
    call.outputs.push_back(snapshot(output));
  }
  if (overwrites_first(op)) {
    const auto& first = call.inputs.front().toTensor();
    call.overwrites = covers_its_storage(first);
    for (std::size_t i = 1; i < call.inputs.size(); ++i) {
      for_each_tensor(call.inputs[i], [&](const at::Tensor& tensor) {
        call.overwrites = call.overwrites && storage_of(tensor) != storage_of(first);
      });
    }
    auto& pending = pending_.at(storage_of(first));
    if (call.overwrites && !pending.noted && pending.made_here) {
      pending.aside.clear();
    }
  }
  for (const auto& input : call.inputs) {
    for_each_tensor(input, [&](const at::Tensor& tensor) {
      if (const auto found = pending_.find(storage_of(tensor)); found != pending_.end()) {
        found->second.noted = true;
      }
    });
  }
  if (is_random(op)) {
    draws_of(call);
  }
  calls_.push_back(std::move(call));
}

at::Tensor Recording::without_memory(const at::Tensor& like, c10::Device device) {
  auto tensor = empty_without_memory(like, c10::DataPtr(nullptr, device), kNoValues);
  pending_[storage_of(tensor)].storage = tensor.storage();
  return tensor;
}

void Recording::put_aside(const at::Tensor& tensor, bool made_here) {
  auto* storage = storage_of(tensor);
  if (pending_.contains(storage)) {
    return;
  }
  auto& pending = pending_[storage];
  pending.storage = tensor.storage();
  pending.made_here = made_here;
  pending.aside = storage->set_data_ptr(c10::DataPtr(nullptr, storage->device()));
  remove_memory(storage);
  small_.erase(storage);
}

Recording::Draws& Recording::draws_of(const Call& call) {
  const auto& given = call.inputs[*index_of(call.op, "generator")];
  auto theirs = given.isNone() ? at::globalContext().defaultGenerator(device_of(call.inputs)) : given.toGenerator();
  const auto found =
      std::find_if(draws_.begin(), draws_.end(), [&](const Draws& draws) { return draws.theirs == theirs; });
  if (found != draws_.end()) {
    return *found;
  }
  const std::lock_guard lock(theirs.mutex());
  draws_.push_back({.theirs = theirs, .before = theirs.get_state(), .ours = theirs.clone()});
  return draws_.back();
}

std::string Recording::summary() const {
  return c10::str(calls_.size(), " operators and ", draws_.size(), " generators");
}

std::vector<std::string> Recording::seeds() const {
  std::vector<std::string> states;
  for (const auto& draws : draws_) {
    states.emplace_back(
        static_cast<const char*>(draws.before.const_data_ptr()), static_cast<std::size_t>(draws.before.nbytes()));
  }
  return states;
}

void Recording::set_seeds(const std::vector<std::string>& states) {
  for (std::size_t i = 0; i < draws_.size(); ++i) {
    auto state = draws_[i].before.clone();
    TORCH_CHECK(states.at(i).size() == state.nbytes(), "[deferred_init] rank 0's generators are of another kind");
    std::copy(states[i].begin(), states[i].end(), static_cast<char*>(state.mutable_data_ptr()));
    draws_[i].replaced = !at::equal(state, draws_[i].before);
    draws_[i].ours.set_state(state);
  }
}

} // namespace ebb::shard
