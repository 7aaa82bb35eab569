#pragma once

#include "ebb/comm/communicator.h"

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace ebb::comm {

/// Ranks arranged along named axes. One axis ("shard") today; two ("replicate", "shard") for hybrid sharding.
///
/// Rank r of the world sits at (r / shard, r % shard): ranks of one shard group are neighbours, so that they share a
/// host where a host has as many.
class Mesh {
 public:
  /// One axis over all ranks of `world`.
  explicit Mesh(std::shared_ptr<Communicator> world);

  /// Two axes; replicate x shard must equal world->size(). Collective: makes the groups of both axes.
  static Mesh replicate_by_shard(std::shared_ptr<Communicator> world, int replicate, int shard);

  /// The group of `ranks` neighbours along the shard axis that this rank is in: positions [0, ranks), [ranks, 2 ranks),
  /// ... Collective over the shard axis; the same group each time. `ranks` divides the axis.
  std::shared_ptr<Communicator> shard_neighbours(int ranks) const;

  /// The same ranks along the same axes, in groups of their own, so that what runs in them does not queue behind what runs
  /// in these. Collective over the world; other groups each time.
  Mesh separate() const;

  const std::vector<std::string>& axes() const;
  /// Whether axis(`axis`) would find a group.
  bool has_axis(const std::string& axis) const;
  /// The group of this rank along `axis`.
  /// @throws ValueError when there is no such axis; lists those there are.
  const std::shared_ptr<Communicator>& axis(const std::string& axis) const;
  const std::shared_ptr<Communicator>& world() const;

 private:
  Mesh() = default;
  std::shared_ptr<Communicator> world_;
  std::vector<std::string> axes_;
  std::vector<std::shared_ptr<Communicator>> groups_;
  std::shared_ptr<std::map<int, std::shared_ptr<Communicator>>> neighbours_; ///< Shared by copies of the mesh.
};

} // namespace ebb::comm
