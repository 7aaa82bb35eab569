#include "ebb/comm/mesh.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>

namespace ebb::comm {
namespace {

std::string list(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) {
    text += (text.empty() ? "'" : ", '") + name + "'";
  }
  return text;
}

} // namespace

Mesh::Mesh(std::shared_ptr<Communicator> world) : world_(std::move(world)) {
  TORCH_CHECK_VALUE(
      world_ != nullptr, "[Mesh] expected a communicator, got none; pass comm::init(...) or comm::single()");
  axes_ = {"shard"};
  groups_ = {world_};
  neighbours_ = std::make_shared<std::map<int, std::shared_ptr<Communicator>>>();
}

Mesh Mesh::replicate_by_shard(std::shared_ptr<Communicator> world, int replicate, int shard) {
  TORCH_CHECK_VALUE(
      world != nullptr,
      "[Mesh::replicate_by_shard] expected a communicator, got none; pass comm::init(...) or comm::single()");
  TORCH_CHECK_VALUE(
      replicate > 0 && shard > 0 && replicate * shard == world->size(),
      "[Mesh::replicate_by_shard] replicate x shard must equal the number of ranks, got ", replicate, " x ", shard,
      " for ", world->size(), " ranks; choose factors of ", world->size());
  const int row = world->rank() / shard;
  const int column = world->rank() % shard;
  Mesh mesh;
  mesh.axes_ = {"replicate", "shard"};
  mesh.neighbours_ = std::make_shared<std::map<int, std::shared_ptr<Communicator>>>();
  std::vector<int> replicas(replicate);
  std::vector<int> shards(shard);
  for (int i = 0; i < replicate; ++i) {
    replicas[i] = i * shard + column;
  }
  std::iota(shards.begin(), shards.end(), row * shard);
  // Ranks count the uses of a name, so those of one group must have used it equally often: not across shapes.
  const auto shape = std::to_string(replicate) + "x" + std::to_string(shard);
  mesh.groups_.push_back(world->split(replicas, shape + "/replicate" + std::to_string(column)));
  mesh.groups_.push_back(world->split(shards, shape + "/shard" + std::to_string(row)));
  mesh.world_ = std::move(world);
  return mesh;
}

std::shared_ptr<Communicator> Mesh::shard_neighbours(int ranks) const {
  const auto& group = axis("shard");
  TORCH_CHECK_VALUE(
      ranks >= 1 && group->size() % ranks == 0, "[Mesh::shard_neighbours] expected a number that divides the ",
      group->size(), " ranks of the shard axis, got ", ranks);
  auto& made = (*neighbours_)[ranks];
  if (!made) {
    std::vector<int> near(ranks);
    const int first = group->rank() / ranks * ranks;
    std::iota(near.begin(), near.end(), first);
    made = group->split(near, "near" + std::to_string(ranks) + "from" + std::to_string(first));
  }
  return made;
}

Mesh Mesh::separate() const {
  std::vector<int> all(world_->size());
  std::iota(all.begin(), all.end(), 0);
  auto world = world_->split(all, "separate");
  return has_axis("replicate") ? replicate_by_shard(std::move(world), axis("replicate")->size(), axis("shard")->size())
                               : Mesh(std::move(world));
}

const std::vector<std::string>& Mesh::axes() const {
  return axes_;
}

bool Mesh::has_axis(const std::string& axis) const {
  return std::find(axes_.begin(), axes_.end(), axis) != axes_.end();
}

const std::shared_ptr<Communicator>& Mesh::axis(const std::string& axis) const {
  const auto found = std::find(axes_.begin(), axes_.end(), axis);
  TORCH_CHECK_VALUE(found != axes_.end(), "[Mesh::axis] expected one of ", list(axes_), ", got '", axis, "'");
  return groups_[static_cast<std::size_t>(found - axes_.begin())];
}

const std::shared_ptr<Communicator>& Mesh::world() const {
  return world_;
}

} // namespace ebb::comm
