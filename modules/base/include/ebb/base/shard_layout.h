#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

namespace ebb {

/// Elements [begin, end) of a tensor flattened in row-major order of its logical shape.
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
};

} // namespace ebb
