#include "op_kind.h"
#include "recording.h"

#include <torch/torch.h>

namespace ebb::shard {

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

void remove_memory(c10::StorageImpl* storage) {
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(kNoValues);
}

void Recording::give_memory(Pending& pending) {
  auto* storage = pending.storage.unsafeGetStorageImpl();
  if (storage->_mutable_data_ptr_no_checks()) {
    return;
  }
  storage->clear_data_ptr_access_error_msg_();
  storage->set_data_ptr_noswap(
      pending.aside ? std::move(pending.aside) : storage->allocator()->allocate(storage->nbytes()));
  pending.aside.clear();
}

Recording::Lifetimes Recording::lifetimes() const {
  struct Use {
    std::size_t call;
    bool overwritten;
  };
  std::unordered_map<c10::StorageImpl*, std::vector<Use>> uses;
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    const auto use = [&](const at::Tensor& tensor, bool overwritten) {
      auto* storage = storage_of(tensor);
      if (pending_.contains(storage) && (uses[storage].empty() || uses[storage].back().call != i)) {
        uses[storage].push_back({i, overwritten});
      }
    };
    bool first = true;
    for (const auto& input : calls_[i].inputs) {
      for_each_tensor(input, [&](const at::Tensor& tensor) {
        use(tensor, first && calls_[i].overwrites);
        first = false;
      });
    }
    for (const auto& output : calls_[i].outputs) {
      use(output, false);
    }
  }
  Lifetimes result;
  result.dead_after.resize(calls_.size());
  result.final_after.resize(calls_.size());
  for (const auto& [storage, all] : uses) {
    for (std::size_t k = 1; k < all.size(); ++k) {
      if (all[k].overwritten) {
        result.dead_after[all[k - 1].call].push_back(storage);
      }
    }
    result.final_after[all.back().call].push_back(storage);
  }
  return result;
}

void Recording::run(Call& call) {
  for (const auto& [tensor, version] : call.read) {
    TORCH_CHECK(
        tensor.is_inference() || tensor._version() == version, "[deferred_init] a tensor ", tensor.sizes(),
        " that the constructor used by ", call.op.schema().name(),
        " was changed since; its old values are gone. Give the constructor a copy of its own");
  }
  for (const auto& input : call.inputs) {
    for_each_tensor(input, [&](const at::Tensor& tensor) {
      if (const auto found = pending_.find(storage_of(tensor)); found != pending_.end()) {
        give_memory(found->second);
      }
    });
  }
  torch::jit::Stack stack = call.inputs;
  if (is_random(call.op)) {
    stack[*index_of(call.op, "generator")] = draws_of(call).ours;
  }
  call.op.callBoxed(stack);
  std::size_t next = 0;
  for (const auto& value : stack) {
    for_each_tensor(value, [&](const at::Tensor& result) {
      if (next < call.outputs.size()) {
        const auto& output = call.outputs[next++];
        give_memory(pending_.at(storage_of(output)));
        output.copy_(result);
      }
    });
  }
  call.inputs.clear();
  call.outputs.clear();
  call.read.clear();
}

void Recording::finish(c10::StorageImpl* storage, const std::function<bool(const c10::Storage&)>& take) {
  const auto found = pending_.find(storage);
  give_memory(found->second);
  if (found->second.storage.use_count() > 1 && !take(found->second.storage)) {
    remove_memory(storage);
  }
  pending_.erase(found);
}

void Recording::replay(const std::function<bool(const c10::Storage&)>& take) {
  TORCH_CHECK(!replayed_, "[deferred_init] the model has its values already, or has failed to get them");
  replayed_ = true;
  small_.clear();
  const at::NoGradGuard no_grad;
  const auto lifetimes = this->lifetimes();
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    run(calls_[i]);
    for (auto* storage : lifetimes.dead_after[i]) {
      remove_memory(storage);
    }
    for (auto* storage : lifetimes.final_after[i]) {
      finish(storage, take);
    }
  }
  while (!pending_.empty()) { // allocated and never written
    finish(pending_.begin()->first, take);
  }
  for (auto& draws : draws_) {
    const std::lock_guard lock(draws.theirs.mutex());
    if (!draws.replaced && at::equal(draws.theirs.get_state(), draws.before)) { // as after a direct construction
      draws.theirs.set_state(draws.ours.get_state());
    }
  }
  calls_.clear();
  draws_.clear();
}

} // namespace ebb::shard
