#pragma once

#include "fsdp/subject.h"

#include "ebb/comm/mesh.h"

#include <nlohmann/json_fwd.hpp>

#include <optional>
#include <string>
#include <vector>

namespace ebb::bench {

/// What a contender is, but for the size of its model and its ranks.
struct Kind {
  std::string mode; ///< One of modes().
  std::string case_name = "plain"; ///< One of cases(); all but "full_shard" and "floor" know "plain" alone.
  std::string optimizer = "fused"; ///< See make_adamw().
  int micro_batches = 1; ///< In a step. The gradients of all but the last stay unreduced.
  bool backward_prefetch = true; ///< Off: what backward needs is gathered when it needs it.
};

/// A model and its optimizer under one strategy. step() is what is measured.
class Contender {
 public:
  virtual ~Contender() = default;

  /// One training step on `tokens_BT` and the `targets_BT` to predict; returns the loss before the update.
  at::Tensor step(const at::Tensor& tokens_BT, const at::Tensor& targets_BT);

  at::Tensor loss(const at::Tensor& tokens_BT, const at::Tensor& targets_BT);
  std::int64_t num_parameters() const {
    return num_parameters_;
  }
  std::int64_t num_trainable() const {
    return num_trainable_;
  }

  /// The whole parameters; empty where they are sharded.
  virtual std::vector<at::Tensor> whole_parameters() const {
    return {};
  }
  /// What memory and traffic are compared with: frame bytes and the like. Read after a step.
  virtual nlohmann::json facts() const;

 protected:
  Contender(const Kind& kind, const gpt::Config& config);
  /// `last`: of the step's micro-batches; gradients are reduced.
  virtual void backward(const at::Tensor& loss, bool last);
  /// The optimizer's step; drops the gradients.
  virtual void update() = 0;

  Subject subject_;

 private:
  int micro_batches_;
  std::int64_t num_parameters_ = 0;
  std::int64_t num_trainable_ = 0;
};

const std::vector<std::string>& modes();

/// "bf16": bfloat16 compute and gathers, float32 shards and reductions, all layers alike; the floor keeps a float32 copy
/// for its optimizer. "offload": shards, gradients and optimizer state in a memory-mapped file.
/// @param mesh  All ranks; with two axes hybrid sharding. Not used by "floor", which may pass none.
std::unique_ptr<Contender> make_contender(
    const Kind& kind, const gpt::Config& config, const std::optional<comm::Mesh>& mesh);

} // namespace ebb::bench
