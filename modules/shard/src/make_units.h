#pragma once

#include "ebb/shard/fully_shard.h"
#include "module_tree.h"
#include "offload.h"
#include "unit.h"

#include <memory>
#include <vector>

namespace ebb::shard {

/// Whether parameters may be gathered, reduced and computed with in `dtype`.
bool can_compute_in(c10::ScalarType dtype);

/// Asks MixedPrecision::param_dtype_override_fn for each parameter. @throws ValueError for a dtype that it cannot have.
void override_dtypes(std::vector<UnitPlan>& plans, const MixedPrecision& mixed);

/// One unit from its plan: its parameters grouped by dtype and by whether they train, one flat parameter each. Collective
/// where an integer reshard_after_forward needs a group.
std::unique_ptr<Unit> make_unit(
    const UnitPlan& plan, int index, const ShardOptions& options, const std::shared_ptr<Tier>& tier);

} // namespace ebb::shard
