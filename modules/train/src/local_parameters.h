#pragma once

#include "ebb/train/parameter_set.h"

namespace ebb::train {

/// Base of the sets whose tensors are whole parameters.
class WholeParameters : public ParameterSet {
 public:
  explicit WholeParameters(std::vector<Named> parameters);
  std::vector<Named> named() const override;
  double clip_grad_norm_(double max_norm) override;
  void zero_grad() override;
  std::shared_ptr<void> no_sync() override;
  std::int64_t num_parameters() const override;
  std::int64_t bytes() const override;
  std::string explain() const override;

 private:
  std::vector<Named> parameters_;
};

} // namespace ebb::train
