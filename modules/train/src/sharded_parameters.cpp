#include "ebb/train/parameter_set.h"

#include "ebb/shard/fully_shard.h"

namespace ebb::train {
namespace {

class ShardedParameters final : public ParameterSet {
 public:
  explicit ShardedParameters(shard::ShardedModel model) : model_(std::move(model)) {}
  std::vector<Named> named() const override {
    return model_.named_parameters();
  }
  double clip_grad_norm_(double max_norm) override {
    return model_.clip_grad_norm_(max_norm);
  }
  void zero_grad() override {
    model_.zero_grad();
  }
  std::shared_ptr<void> no_sync() override {
    return std::make_shared<shard::NoSync>(model_.no_sync());
  }
  std::int64_t num_parameters() const override {
    return model_.num_parameters();
  }
  std::int64_t bytes() const override {
    return model_.shard_bytes();
  }
  std::string explain() const override {
    return model_.explain();
  }

 private:
  shard::ShardedModel model_;
};

} // namespace

std::shared_ptr<ParameterSet> sharded_parameters(const shard::ShardedModel& model) {
  return std::make_shared<ShardedParameters>(model);
}

} // namespace ebb::train
