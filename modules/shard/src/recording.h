#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace ebb::shard {

// Note [Deferred initialisation]
// While a model is built under record(), a mode key sends every operator here. Large tensors get a storage without
// memory, whose access by pointer throws; views of them are real views, since a view reads nothing. What would write to
// such a storage is written down with snapshots of its arguments (same storage, sizes and strides: the tensors
// themselves may be transposed or given other data later). replay() runs the list in order, since random numbers must
// fall as they would have, and gives each storage memory when it is first written. A storage is handed over and freed
// once nothing later touches it, and is without memory also where the next operator overwrites all of it (PyTorch's
// layers initialise themselves, then a model initialises them again): at most a few tensors have memory at a time.
//
// Constants of up to kSmallNumel elements are computed at once: code reads and fills such tensors by pointer, as
// torch::tensor({...}) does. One becomes pending, its values put aside, when a recorded operator reads or writes it.

/// Included per thread while record() runs. LibTorch registers nothing on it outside its own tests.
inline constexpr c10::DispatchKey kRecordKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

/// What the construction of a model did to tensors.
class Recording {
 public:
  Recording() = default;
  Recording(const Recording&) = delete;
  /// Gives tensors made elsewhere, which it had put aside, their values back.
  ~Recording();

  /// Runs `op` on the stack, or notes it and puts results without values there.
  void call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

  /// Whether `tensor` has no values yet.
  bool pending(const at::Tensor& tensor) const;

  /// How many operators and generators it holds: the same on ranks that built the same model.
  std::string summary() const;
  /// States of the generators that the construction would have drawn from, in the order of first use.
  std::vector<std::string> seeds() const;
  /// Replays with these states instead, say another rank's.
  void set_seeds(const std::vector<std::string>& states);

  /// Runs everything. `take` is told of each storage that somebody outside still holds as soon as its values are final,
  /// while they are in memory; they stay there when it returns true, and are freed when it returns false. Once.
  void replay(const std::function<bool(const c10::Storage&)>& take);

 private:
  struct Call {
    c10::OperatorHandle op;
    std::vector<c10::IValue> inputs; ///< Tensors are snapshots.
    std::vector<at::Tensor> outputs; ///< Snapshots of new tensors.
    std::vector<std::pair<at::Tensor, std::uint32_t>> read; ///< Tensors with values made elsewhere, and their version.
    bool overwrites = false; ///< All of the storage of its first input.
  };
  struct Pending {
    c10::Storage storage;
    at::DataPtr aside; ///< Values it has had, for the replay.
    bool made_here = true;
    bool noted = false; ///< Some call touches it.
  };
  struct Draws {
    at::Generator theirs;
    at::Tensor before; ///< State of theirs, at the first recorded draw.
    at::Generator ours; ///< Draws in the replay: whoever has seeded or drawn from theirs since is not disturbed.
    bool replaced = false; ///< ours was given another state.
  };
  /// Storages that each call touches, and the calls that touch each storage.
  struct Lifetimes {
    std::vector<std::vector<c10::StorageImpl*>> dead_after; ///< Next comes what overwrites them.
    std::vector<std::vector<c10::StorageImpl*>> final_after;
  };

  void make_empty(const c10::OperatorHandle& op, const std::vector<c10::IValue>& inputs, torch::jit::Stack* stack);
  void make(const c10::OperatorHandle& op, const std::vector<c10::IValue>& inputs, torch::jit::Stack* stack);
  void write(const c10::OperatorHandle& op, const std::vector<c10::IValue>& inputs, torch::jit::Stack* stack);
  void note(const c10::OperatorHandle& op, const std::vector<c10::IValue>& inputs, std::vector<at::Tensor> outputs);
  at::Tensor without_memory(const at::Tensor& like, c10::Device device);
  void put_aside(const at::Tensor& tensor, bool made_here);
  void give_memory(Pending& pending);
  Draws& draws_of(const Call& call);
  Lifetimes lifetimes() const;
  void run(Call& call);
  void finish(c10::StorageImpl* storage, const std::function<bool(const c10::Storage&)>& take);

  std::vector<Call> calls_;
  std::unordered_map<c10::StorageImpl*, Pending> pending_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> small_; ///< Made here, with memory.
  std::unordered_set<const c10::StorageImpl*> read_; ///< Made elsewhere and read by a recorded operator.
  std::vector<Draws> draws_;
  bool replayed_ = false;
};

/// What access by pointer to a tensor without values says.
inline constexpr const char* kNoValues =
    "[deferred_init] this tensor has no values yet; give the model its values first, with "
    "fully_shard(deferred, options) or deferred.materialize(). A constructor that reads or writes values by pointer, "
    "other than those of small constants, must be called directly";

/// nullptr for a tensor without storage.
c10::StorageImpl* storage_of(const at::Tensor& tensor);
/// Frees the memory of a storage; access by pointer throws from then on, and says why.
void remove_memory(c10::StorageImpl* storage);

} // namespace ebb::shard
