#pragma once

#include "ebb/comm/communicator.h"

#include <memory>
#include <utility>

namespace ebb::test {

/// Does what another group does: the base of those that change something of it.
class ForwardingCommunicator : public comm::Communicator {
 public:
  explicit ForwardingCommunicator(std::shared_ptr<comm::Communicator> group)
      : Communicator(group->rank(), group->size()), group_(std::move(group)) {}

  const comm::Capabilities& capabilities() const override {
    return group_->capabilities();
  }
  std::unique_ptr<comm::Work> all_gather(
      const at::Tensor& output, const at::Tensor& input, std::string_view unit) override {
    return group_->all_gather(output, input, unit);
  }
  std::unique_ptr<comm::Work> reduce_scatter(
      const at::Tensor& output, const at::Tensor& input, double divisor, std::string_view unit) override {
    return group_->reduce_scatter(output, input, divisor, unit);
  }
  std::unique_ptr<comm::Work> all_reduce(
      const at::Tensor& tensor, comm::ReduceOp op, double divisor, std::string_view unit) override {
    return group_->all_reduce(tensor, op, divisor, unit);
  }
  std::unique_ptr<comm::Work> broadcast(const at::Tensor& tensor, int root, std::string_view unit) override {
    return group_->broadcast(tensor, root, unit);
  }
  void barrier() override {
    group_->barrier();
  }
  std::vector<std::string> exchange(const std::string& mine) override {
    return group_->exchange(mine);
  }
  void abort() noexcept override {
    group_->abort();
  }
  void set_step(std::int64_t step) override {
    group_->set_step(step);
  }
  const comm::Traffic& traffic() const override {
    return group_->traffic();
  }

 protected:
  comm::Communicator& group() const {
    return *group_;
  }
  std::shared_ptr<comm::Communicator> split(const std::vector<int>& ranks, const std::string& name) override {
    return (*group_.*&Splitter::split)(ranks, name);
  }

 private:
  /// Communicator::split() is for Mesh; this lends it to the communicator that holds another.
  struct Splitter : comm::Communicator {
    using Communicator::split;
  };
  std::shared_ptr<comm::Communicator> group_;
};

} // namespace ebb::test
