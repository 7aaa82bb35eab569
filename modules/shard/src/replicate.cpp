#include "ebb/shard/replicate.h"

#include "dispatch.h"
#include "gradient_norm.h"
#include "module_tree.h"
#include "reducer.h"
#include "sync.h"

#include <torch/script.h>
#include <torch/torch.h>

#include <algorithm>
#include <unordered_set>

namespace ebb::shard {
namespace {

void check_options(const ReplicateOptions& options, const ModuleTree& tree) {
  TORCH_CHECK_VALUE(
      options.bucket_bytes > 0 && options.first_bucket_bytes > 0, "[replicate] expected positive bucket sizes, got ",
      options.bucket_bytes, " and ", options.first_bucket_bytes);
  for (const auto bytes : options.bucket_bytes_list) {
    TORCH_CHECK_VALUE(bytes > 0, "[replicate] expected positive sizes in bucket_bytes_list, got ", bytes);
  }
  std::unordered_set<std::string> names;
  for (const auto& node : tree.nodes) {
    for (const auto& [name, tensor] : node.parameters) {
      names.insert(name);
    }
  }
  auto asked = options.delayed_parameters;
  if (!options.delay_until.empty()) {
    TORCH_CHECK_VALUE(
        !asked.empty() && std::find(asked.begin(), asked.end(), options.delay_until) == asked.end(),
        "[replicate] delay_until ('", options.delay_until,
        "') says when delayed_parameters are reduced: name some, and not this one among them");
    asked.push_back(options.delay_until);
  }
  for (const auto& name : asked) {
    TORCH_CHECK_VALUE(
        names.count(name), "[replicate] expected names of parameters in delayed_parameters and delay_until, got '",
        name, "'; they are spelled as in named_parameters()");
  }
}

// All that must be the same on all ranks.
std::string settings_of(const ReplicateOptions& options) {
  return c10::str(
      "replicate, buckets of ", options.bucket_bytes, ", first ", options.first_bucket_bytes, ", list [",
      options.bucket_bytes_list, "], delayed [", options.delayed_parameters, "] until '", options.delay_until,
      "', broadcast_buffers ", options.broadcast_buffers, ", skip_unused ", options.skip_unused, ", static_graph ",
      options.static_graph, ", sync_module_states ", options.sync_module_states);
}

template <class Model>
ReplicatedModel replicate_model(Model& model, ReplicateOptions options) {
  const auto tree = ModuleTree::of(model);
  check_options(options, tree);
  for (const auto& node : tree.nodes) {
    for (const auto& [name, tensor] : node.parameters) {
      TORCH_CHECK_VALUE(
          !tensor.key_set().has(kPagedKey), "[replicate] '", name,
          "' is sharded by fully_shard(); choose one of the two for a model");
    }
  }
  const auto group = options.mesh.world();
  check_same_model("replicate", tree, settings_of(options), " none", *group);
  if (options.sync_module_states) {
    broadcast_from_rank0(tree, *group);
  }
  auto reducer = std::make_shared<Reducer>(std::move(options), tree);
  reducer->attach();
  return ReplicatedModel(std::move(reducer));
}

} // namespace

ReplicatedModel::ReplicatedModel(std::shared_ptr<Reducer> reducer) : reducer_(std::move(reducer)) {}

std::vector<std::pair<std::string, at::Tensor>> ReplicatedModel::named_parameters() const {
  return reducer_->named_parameters();
}

std::vector<at::Tensor> ReplicatedModel::parameters() const {
  std::vector<at::Tensor> parameters;
  for (const auto& [name, tensor] : reducer_->named_parameters()) {
    parameters.push_back(tensor);
  }
  return parameters;
}

double ReplicatedModel::clip_grad_norm_(double max_norm, double norm_type) {
  return clip_gradients({}, parameters(), max_norm, norm_type, nullptr);
}

void ReplicatedModel::zero_grad(bool set_to_none) {
  for (auto& [name, tensor] : reducer_->named_parameters()) {
    auto& grad = tensor.mutable_grad();
    if (grad.defined() && !set_to_none) {
      grad.zero_();
    } else {
      grad = at::Tensor();
    }
  }
}

ReplicaNoSync::ReplicaNoSync(std::shared_ptr<Reducer> reducer) : reducer_(std::move(reducer)) {
  reducer_->enter_no_sync();
}

ReplicaNoSync::~ReplicaNoSync() {
  if (reducer_) {
    reducer_->leave_no_sync();
  }
}

ReplicaNoSync ReplicatedModel::no_sync() {
  return ReplicaNoSync(reducer_);
}

void ReplicatedModel::sync_buffers() {
  reducer_->sync_buffers();
}

void ReplicatedModel::set_manual_backward_finalization(bool manual) {
  reducer_->set_manual_finalization(manual);
}

void ReplicatedModel::finalize_backward() {
  reducer_->finalize();
}

std::string ReplicatedModel::explain() const {
  return reducer_->explain();
}

void ReplicatedModel::reset() {
  reducer_->reset();
}

ReplicatedModel replicate(torch::nn::Module& model, ReplicateOptions options) {
  return replicate_model(model, std::move(options));
}

ReplicatedModel replicate(torch::jit::Module& model, ReplicateOptions options) {
  return replicate_model(model, std::move(options));
}

} // namespace ebb::shard
