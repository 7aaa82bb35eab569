#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

namespace ebb {

/// Elements [begin, end) of a tensor flattened in memory order: row-major, or what ShardLayout::dim_order says.
struct FlatSlice {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool operator==(const FlatSlice&) const = default;
};

/// Which part of one named tensor this rank holds. `shard` makes it, `checkpoint` takes it.
struct ShardLayout {
  std::string name; ///< Fully qualified, as named_parameters() spells it.
  std::vector<std::int64_t> global_shape;
  c10::ScalarType dtype = c10::ScalarType::Float; ///< Of the master copy.
  std::vector<FlatSlice> slices; ///< Ascending, disjoint; none when this rank holds nothing.
  /// The dimensions from the outermost in memory to the innermost, of a parameter that is dense but not row-major
  /// (channels-last, transposed): `tensor.permute(dim_order).reshape(-1)` is what slices count in. Empty: row-major.
  std::vector<std::int64_t> dim_order = {};
};

} // namespace ebb
