#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace ebb::shard {
class ShardedModel;
class ReplicatedModel;
} // namespace ebb::shard

namespace ebb::train {

/// A named tensor.
using Named = std::pair<std::string, at::Tensor>;

/// The parameters that this rank trains, and what must be done differently for each way of spreading them over ranks.
class ParameterSet {
 public:
  virtual ~ParameterSet() = default;

  /// This rank's part of every parameter, by the model's names. Leaves with a grad after backward; what optimizers
  /// take.
  virtual std::vector<Named> named() const = 0;
  /// The norm of the gradient of the whole model, which is then scaled to at most `max_norm` (infinity does not scale).
  /// Collective.
  virtual double clip_grad_norm_(double max_norm) = 0;
  /// While what it returns lives, backward leaves gradients unreduced; the first one afterwards reduces all of them.
  virtual std::shared_ptr<void> no_sync() = 0;
  /// Lets go of the gradients of named().
  virtual void zero_grad() = 0;
  /// Of the whole model; tied parameters once.
  virtual std::int64_t num_parameters() const = 0;
  /// Bytes of parameters that this rank keeps between steps.
  virtual std::int64_t bytes() const = 0;
  /// Text for people: what is where.
  virtual std::string explain() const = 0;
};

/// The tensors alone.
std::vector<at::Tensor> tensors_of(const std::vector<Named>& named);

/// Parameters that are whole on this rank and whose gradients nobody else adds to.
std::shared_ptr<ParameterSet> local_parameters(std::vector<Named> parameters);
/// This rank's shards; clipping takes the norm over all ranks.
std::shared_ptr<ParameterSet> sharded_parameters(const shard::ShardedModel& model);
/// Parameters that are whole on every rank, with gradients averaged over them.
std::shared_ptr<ParameterSet> replicated_parameters(const shard::ReplicatedModel& model);

} // namespace ebb::train
