#include "ebb/shard/fully_shard.h"

#include "ebb/base/error.h"
#include "ebb/base/log.h"
#include "engine.h"
#include "gradient_norm.h"

#include <torch/torch.h>

#include <algorithm>
#include <unordered_map>

namespace ebb::shard {
namespace {

template <class Function>
void for_each_flat(const Engine& engine, Function function) {
  for (const auto& unit : engine.units()) {
    for (const auto& flat : unit->flats) {
      function(*flat);
    }
  }
}

} // namespace

ShardedModel::ShardedModel(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}

std::vector<std::pair<std::string, at::Tensor>> ShardedModel::named_parameters() const {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for_each_flat(*engine_, [&](const FlatParameter& flat) {
    for (const auto& member : flat.members) {
      named.emplace_back(member.name, member.leaf);
    }
  });
  return named;
}

std::vector<at::Tensor> ShardedModel::parameters() const {
  std::vector<at::Tensor> leaves;
  for (auto& [name, leaf] : named_parameters()) {
    leaves.push_back(std::move(leaf));
  }
  return leaves;
}

std::vector<std::pair<std::string, at::Tensor>> ShardedModel::ignored_parameters() const {
  return engine_->ignored();
}

void ShardedModel::set_optimizer_in_backward(std::function<void(const std::string& name, at::Tensor& leaf)> function) {
  engine_->set_optimizer_in_backward(std::move(function));
}

double ShardedModel::clip_grad_norm_(double max_norm, double norm_type) {
  std::vector<at::Tensor> sharded;
  std::vector<at::Tensor> whole;
  for (const auto& unit : engine_->units()) {
    for (const auto& flat : unit->flats) {
      for (const auto& member : flat->members) {
        (unit->whole ? whole : sharded).push_back(member.leaf);
      }
    }
  }
  return clip_gradients(sharded, whole, max_norm, norm_type, &engine_->group());
}

void ShardedModel::zero_grad(bool set_to_none) {
  engine_->drop_unsynced();
  for_each_flat(*engine_, [&](FlatParameter& flat) {
    for (auto& member : flat.members) {
      auto& grad = member.leaf.mutable_grad();
      if (grad.defined() && !set_to_none) {
        grad.zero_();
      } else {
        grad = at::Tensor();
      }
    }
  });
}

NoSync::NoSync(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {
  engine_->enter_no_sync();
}

NoSync::~NoSync() {
  if (engine_) {
    engine_->leave_no_sync();
  }
}

NoSync ShardedModel::no_sync() {
  return NoSync(engine_);
}

void ShardedModel::set_requires_gradient_sync(bool sync) {
  set_requires_gradient_sync(units(), sync);
}

void ShardedModel::set_requires_gradient_sync(const std::vector<std::string>& units, bool sync) {
  engine_->set_sync(engine_->find_units("set_requires_gradient_sync", units), sync);
}

void ShardedModel::set_requires_all_reduce(bool all_reduce) {
  set_requires_all_reduce(units(), all_reduce);
}

void ShardedModel::set_requires_all_reduce(const std::vector<std::string>& units, bool all_reduce) {
  engine_->set_all_reduce(engine_->find_units("set_requires_all_reduce", units), all_reduce);
}

void ShardedModel::set_is_last_backward(bool is_last) {
  engine_->set_last_backward(is_last);
}

void ShardedModel::set_manual_backward_finalization(bool manual) {
  engine_->set_manual_finalization(manual);
}

void GradientReductionHandle::wait() {
  if (const auto engine = std::exchange(engine_, nullptr)) {
    engine->finish_finalizing();
  }
}

GradientReductionHandle ShardedModel::finalize_backward(bool async_op) {
  engine_->start_finalizing();
  GradientReductionHandle handle(engine_);
  if (!async_op) {
    handle.wait();
  }
  return handle;
}

void ShardedModel::set_reduce_scatter_max_input_buffers(int number) {
  engine_->set_max_reductions(number);
}

void ShardedModel::set_keep_unsharded_storage(const std::vector<std::string>& units, bool keep) {
  engine_->set_keep_storage(engine_->find_units("set_keep_unsharded_storage", units), keep);
}

void ShardedModel::set_post_optim_event(std::function<void()> done) {
  engine_->set_post_optim_event(std::move(done));
}

void ShardedModel::set_full_precision(bool full) {
  engine_->set_full_precision(full);
}

void UnshardHandle::wait() {
  engine_->wait_unsharded(units_);
}

UnshardHandle ShardedModel::unshard(const std::vector<std::string>& units) {
  auto found = engine_->find_units("unshard", units);
  engine_->unshard(found);
  return {engine_, std::move(found)};
}

void ShardedModel::reshard(const std::vector<std::string>& units) {
  engine_->reshard(engine_->find_units("reshard", units));
}

void ShardedModel::set_reshard_after_forward(const std::vector<std::string>& units, bool reshard) {
  engine_->set_reshard_after_forward(engine_->find_units("set_reshard_after_forward", units), reshard);
}

void ShardedModel::set_reshard_after_backward(const std::vector<std::string>& units, bool reshard) {
  engine_->set_reshard_after_backward(engine_->find_units("set_reshard_after_backward", units), reshard);
}

void ShardedModel::set_forward_prefetch(const std::string& unit, const std::vector<std::string>& next) {
  const auto at = engine_->find_units("set_forward_prefetch", {unit}).front();
  engine_->set_prefetch(at, Pass::kForward, engine_->find_units("set_forward_prefetch", next));
}

void ShardedModel::set_backward_prefetch(const std::string& unit, const std::vector<std::string>& next) {
  const auto at = engine_->find_units("set_backward_prefetch", {unit}).front();
  engine_->set_prefetch(at, Pass::kBackward, engine_->find_units("set_backward_prefetch", next));
}

std::vector<std::string> ShardedModel::units() const {
  std::vector<std::string> names;
  for (const auto& unit : engine_->units()) {
    names.push_back(unit->name);
  }
  return names;
}

at::Tensor ShardedModel::cast_output(const at::Tensor& output) const {
  const auto& dtype = engine_->options().mixed_precision.output_dtype;
  return dtype && output.is_floating_point() ? output.to(*dtype) : output;
}

FullParameters ShardedModel::full_parameters(FullParametersOptions options) {
  return FullParameters(engine_, std::move(options));
}

std::vector<ShardLayout> ShardedModel::layout() const {
  std::vector<ShardLayout> layouts;
  for_each_flat(*engine_, [&](const FlatParameter& flat) {
    for (const auto& member : flat.members) {
      ShardLayout layout{member.name, member.sizes, flat.master_dtype, {}, member.dim_order};
      if (member.slice_begin < member.slice_end) {
        layout.slices.push_back({member.slice_begin, member.slice_end});
      }
      layouts.push_back(std::move(layout));
    }
  });
  return layouts;
}

Residency ShardedModel::residency() const {
  return engine_->residency();
}

ShardStats ShardedModel::stats() const {
  return engine_->stats();
}

void ShardedModel::reset_stats() {
  engine_->reset_stats();
}

void ShardedModel::reset() {
  engine_->reset();
}

std::int64_t ShardedModel::num_parameters() const {
  std::int64_t count = 0;
  for_each_flat(*engine_, [&](const FlatParameter& flat) {
    for (const auto& member : flat.members) {
      count += member.numel;
    }
  });
  return count;
}

std::int64_t ShardedModel::shard_bytes() const {
  std::int64_t bytes = 0;
  for_each_flat(*engine_, [&](const FlatParameter& flat) { bytes += flat.shard_bytes(); });
  return bytes;
}

const comm::Mesh& ShardedModel::mesh() const {
  return engine_->options().mesh;
}

} // namespace ebb::shard
