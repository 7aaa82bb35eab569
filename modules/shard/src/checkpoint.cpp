#include "ebb/shard/checkpoint.h"

#include "activation_store.h"

#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <optional>
#include <unordered_set>
#include <utility>

namespace ebb::shard {
namespace {

using torch::autograd::variable_list;

/// The states of the random number generators that a function may draw from, and putting them back.
class RngState {
 public:
  explicit RngState(const variable_list& inputs) {
    add(at::Device(at::kCPU));
    for (const auto& input : inputs) {
      if (input.defined() && !input.is_cpu() && !input.is_meta()) {
        add(input.device());
      }
    }
  }
  void restore() {
    for (auto& [generator, state] : states_) {
      const std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    }
  }

 private:
  void add(at::Device device) {
    auto generator = at::globalContext().defaultGenerator(device);
    if (std::none_of(states_.begin(), states_.end(), [&](const auto& seen) { return seen.first == generator; })) {
      const std::lock_guard lock(generator.mutex());
      states_.emplace_back(generator, generator.get_state());
    }
  }
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

/// The autocast state of this thread: kept, put in place, put back.
class Autocast {
 public:
  Autocast() {
    for (std::size_t i = 0; i < kDevices.size(); ++i) {
      enabled_[i] = at::autocast::is_autocast_enabled(kDevices[i]);
      dtype_[i] = at::autocast::get_autocast_dtype(kDevices[i]);
    }
    cache_ = at::autocast::is_autocast_cache_enabled();
  }
  void apply() const {
    for (std::size_t i = 0; i < kDevices.size(); ++i) {
      at::autocast::set_autocast_enabled(kDevices[i], enabled_[i]);
      at::autocast::set_autocast_dtype(kDevices[i], dtype_[i]);
    }
    at::autocast::set_autocast_cache_enabled(cache_);
  }

 private:
  static constexpr std::array kDevices{at::kCPU, at::kCUDA};
  std::array<bool, kDevices.size()> enabled_{};
  std::array<at::ScalarType, kDevices.size()> dtype_{};
  bool cache_ = true;
};

/// The leaves that the graph of `outputs` ends in, but for `inputs`. Nodes made before `first` belong to somebody else.
variable_list captured_leaves(const variable_list& outputs, const variable_list& inputs, std::uint64_t first) {
  variable_list leaves;
  std::unordered_set<const torch::autograd::Node*> seen;
  std::vector<torch::autograd::Node*> open;
  const auto visit = [&](torch::autograd::Node* node) {
    if (node && seen.insert(node).second) {
      open.push_back(node);
    }
  };
  for (const auto& output : outputs) {
    if (output.defined() && output.requires_grad()) {
      visit(output.grad_fn().get());
    }
  }
  while (!open.empty()) {
    auto* node = open.back();
    open.pop_back();
    if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node)) {
      const auto& variable = leaf->variable;
      if (std::none_of(inputs.begin(), inputs.end(), [&](const auto& input) { return input.is_same(variable); })) {
        leaves.push_back(variable);
      }
      continue;
    }
    TORCH_CHECK_VALUE(
        node->sequence_nr() >= first, "[checkpoint] the function captures a tensor that has history (made by ",
        node->name(), " before the call): its gradient would be lost; pass that tensor among the inputs");
    for (const auto& edge : node->next_edges()) {
      visit(edge.function.get());
    }
  }
  return leaves;
}

/// What one checkpoint keeps for its backward.
struct Kept : torch::CustomClassHolder {
  CheckpointFunction function;
  std::vector<bool> input_requires_grad;
  std::optional<RngState> rng;
  Autocast autocast;
  std::vector<std::shared_ptr<SavedActivation>> offloaded; ///< By input; nullptr where it stays.
  variable_list first_outputs; ///< On their way into the node.
  std::vector<std::pair<std::vector<std::int64_t>, std::optional<at::ScalarType>>> outputs; ///< Sizes and dtypes.
};

/// Puts back what the first run found, and at its end what was there now, also after an exception.
class AsInForward {
 public:
  AsInForward(Kept& kept, const variable_list& inputs) {
    if (kept.rng) {
      rng_now_.emplace(inputs);
      kept.rng->restore();
    }
    kept.autocast.apply();
  }
  AsInForward(const AsInForward&) = delete;
  ~AsInForward() {
    autocast_now_.apply();
    if (rng_now_) {
      rng_now_->restore();
    }
  }

 private:
  Autocast autocast_now_;
  std::optional<RngState> rng_now_;
};

variable_list detached(const variable_list& inputs, const std::vector<bool>& requires_grad) {
  variable_list result;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    result.push_back(inputs[i].defined() ? inputs[i].detach() : inputs[i]);
    if (requires_grad[i]) {
      result.back().requires_grad_();
    }
  }
  return result;
}

decltype(Kept::outputs) shapes_of(const variable_list& outputs) {
  decltype(Kept::outputs) shapes;
  for (const auto& output : outputs) {
    shapes.emplace_back(
        output.defined() ? output.sizes().vec() : std::vector<std::int64_t>{},
        output.defined() ? std::optional(output.scalar_type()) : std::nullopt);
  }
  return shapes;
}

// Captured parameters are inputs of the node, so that their gradients come out of it into the outer backward: hooks fire
// there, once, whatever the number of uses.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static variable_list forward(
      torch::autograd::AutogradContext* context, at::TensorList inputs, at::TensorList leaves,
      const c10::intrusive_ptr<Kept>& kept) {
    variable_list saved(inputs.begin(), inputs.end());
    for (std::size_t i = 0; i < kept->offloaded.size(); ++i) {
      if (kept->offloaded[i]) {
        saved[i] = at::Tensor();
      }
    }
    saved.insert(saved.end(), leaves.begin(), leaves.end());
    context->save_for_backward(saved);
    context->saved_data["kept"] = c10::IValue::make_capsule(kept);
    variable_list results;
    variable_list integers;
    for (const auto& output : std::exchange(kept->first_outputs, {})) {
      results.push_back(output.defined() ? output.detach() : output);
      if (output.defined() && !output.requires_grad()) {
        integers.push_back(results.back());
      }
    }
    context->mark_non_differentiable(integers);
    return results;
  }

  static variable_list backward(torch::autograd::AutogradContext* context, const variable_list& gradients) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !at::GradMode::is_enabled(),
        "[checkpoint] create_graph through a checkpoint is not supported: its backward is a recomputation, not a "
        "graph; call the function without checkpoint() there");
    const auto kept = c10::static_intrusive_pointer_cast<Kept>(context->saved_data["kept"].toCapsule());
    auto saved = context->get_saved_variables();
    const auto num_inputs = kept->input_requires_grad.size();
    for (std::size_t i = 0; i < kept->offloaded.size(); ++i) {
      if (auto& activation = kept->offloaded[i]) {
        saved[i] = activation->store->take(*activation, !torch::autograd::get_current_graph_task_keep_graph());
      }
    }
    const auto inputs =
        detached({saved.begin(), saved.begin() + static_cast<std::ptrdiff_t>(num_inputs)}, kept->input_requires_grad);

    variable_list outputs;
    {
      const at::AutoGradMode grad_mode(true);
      const AsInForward as_in_forward(*kept, inputs);
      outputs = kept->function(inputs);
    }
    TORCH_CHECK_VALUE(
        shapes_of(outputs) == kept->outputs,
        "[checkpoint] the recomputation in backward gave outputs of other shapes or dtypes than the first run; the "
        "function must depend on its inputs, on parameters and on random numbers alone");

    variable_list roots;
    variable_list root_gradients;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (gradients[i].defined() && outputs[i].defined() && outputs[i].requires_grad()) {
        roots.push_back(outputs[i]);
        root_gradients.push_back(gradients[i]);
      }
    }
    variable_list wanted;
    for (std::size_t i = 0; i < saved.size(); ++i) {
      if (i >= num_inputs) {
        wanted.push_back(saved[i]);
      } else if (kept->input_requires_grad[i]) {
        wanted.push_back(inputs[i]);
      }
    }
    variable_list found(wanted.size());
    if (!roots.empty() && !wanted.empty()) {
      found = torch::autograd::grad(
          roots, wanted, root_gradients, /*retain_graph=*/std::nullopt, /*create_graph=*/false, /*allow_unused=*/true);
    }
    variable_list result;
    std::size_t next = 0;
    for (std::size_t i = 0; i < saved.size(); ++i) {
      const bool wants = i >= num_inputs || kept->input_requires_grad[i];
      result.push_back(wants ? found[next++] : at::Tensor());
    }
    result.emplace_back(); // for `kept`
    return result;
  }
};

} // namespace

std::vector<at::Tensor> checkpoint(
    CheckpointFunction function, std::vector<at::Tensor> inputs, const CheckpointOptions& options) {
  TORCH_CHECK_VALUE(function, "[checkpoint] expected a function, got an empty one");
  if (!options.enabled || !at::GradMode::is_enabled()) {
    return function(inputs);
  }
  auto kept = c10::make_intrusive<Kept>();
  for (const auto& input : inputs) {
    kept->input_requires_grad.push_back(input.defined() && input.requires_grad());
  }
  if (options.preserve_rng_state) {
    kept->rng.emplace(inputs);
  }
  const auto first = at::sequence_number::peek();
  auto own = detached(inputs, kept->input_requires_grad);
  if (options.offload) { // before the function, under which the copies go on
    for (const auto& input : inputs) {
      kept->offloaded.push_back(options.offload->store().save(input));
    }
  }
  kept->first_outputs = function(own);
  kept->outputs = shapes_of(kept->first_outputs);
  kept->function = std::move(function);
  const auto leaves = captured_leaves(kept->first_outputs, own, first);
  return Checkpoint::apply(at::TensorList(inputs), at::TensorList(leaves), kept); // the first graph ends here
}

} // namespace ebb::shard
