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

double ShardedModel::clip_grad_norm_(double max_norm, double norm_type) {
  const bool whole = engine_->options().strategy == Strategy::kNoShard;
  return clip_gradients(parameters(), max_norm, norm_type, whole ? nullptr : &engine_->group());
}

void ShardedModel::zero_grad(bool set_to_none) {
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

FullParameters ShardedModel::full_parameters(FullParametersOptions options) {
  return FullParameters(engine_, options);
}

std::vector<ShardLayout> ShardedModel::layout() const {
  std::vector<ShardLayout> layouts;
  for_each_flat(*engine_, [&](const FlatParameter& flat) {
    for (const auto& member : flat.members) {
      ShardLayout layout{member.name, member.sizes, flat.dtype, {}};
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
