#include "local_parameters.h"

#include "ebb/shard/replicate.h"

namespace ebb::train {
namespace {

class ReplicatedParameters final : public WholeParameters {
 public:
  explicit ReplicatedParameters(shard::ReplicatedModel model)
      : WholeParameters(model.named_parameters()), model_(std::move(model)) {}
  double clip_grad_norm_(double max_norm) override {
    return model_.clip_grad_norm_(max_norm);
  }
  void zero_grad() override {
    model_.zero_grad();
  }
  std::shared_ptr<void> no_sync() override {
    return std::make_shared<shard::ReplicaNoSync>(model_.no_sync());
  }
  std::string explain() const override {
    return model_.explain();
  }

 private:
  shard::ReplicatedModel model_;
};

} // namespace

std::shared_ptr<ParameterSet> replicated_parameters(const shard::ReplicatedModel& model) {
  return std::make_shared<ReplicatedParameters>(model);
}

} // namespace ebb::train
