#include "dispatch.h"

#include "engine.h"
#include "offload.h"
#include "paged_storage.h"
#include "unit.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <array>
#include <mutex>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

namespace ebb::shard {
namespace {

// Note [The fallback]
// Every operator that is given a sharded parameter or a view of one comes here first, in forward, in backward and in
// recomputation. It makes the units of its arguments resident, pins them while the operator runs, and passes on below
// the key. Operators that only make views need no bytes and fall through; operators that only read metadata are passed
// on at once. Nested operators come here again and add pins of their own, so no notion of an outermost one is needed.

enum class Action : std::uint8_t { kPage, kPassOn, kReplaceData, kSet, kLike };

struct OperatorTraits {
  Action action = Action::kPage;
  std::uint64_t writes = 0; ///< Bit i: argument i is written to.
  std::uint64_t tensors = 0; ///< Bit i: argument i can hold tensors.
  std::size_t num_arguments = 0;
};

bool may_hold_tensors(const c10::TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      return true;
    case c10::TypeKind::OptionalType:
    case c10::TypeKind::ListType:
      return may_hold_tensors(type->containedType(0));
    case c10::TypeKind::AnyType:
      return true;
    default:
      return false;
  }
}

OperatorTraits traits_of(const c10::FunctionSchema& schema) {
  // They look at shape, dtype and device only; Adam calls some of them on every parameter.
  static const std::unordered_set<std::string_view> metadata_only{
      "aten::ones_like",    "aten::full_like",   "aten::rand_like", "aten::randn_like", "aten::randint_like",
      "aten::new_empty",    "aten::new_zeros",   "aten::new_ones",  "aten::new_full",   "aten::new_empty_strided",
      "aten::is_same_size", "aten::result_type", "aten::can_cast",  "aten::_version",   "aten::requires_grad_",
      "aten::is_leaf",      "aten::retain_grad"};
  OperatorTraits traits;
  traits.num_arguments = schema.arguments().size();
  if (schema.name() == "aten::_has_compatible_shallow_copy_type") {
    traits.action = Action::kReplaceData;
  } else if (schema.name() == "aten::set_" && schema.overload_name() == "source_Tensor") {
    traits.action = Action::kSet;
  } else if (schema.name() == "aten::zeros_like" || schema.name() == "aten::empty_like") {
    traits.action = Action::kLike;
  } else if (metadata_only.count(schema.name())) {
    traits.action = Action::kPassOn;
  }
  TORCH_INTERNAL_ASSERT(traits.num_arguments <= 64, schema.name(), " has more arguments than the fallback can flag");
  for (std::size_t i = 0; i < traits.num_arguments; ++i) {
    const auto& argument = schema.arguments()[i];
    if (may_hold_tensors(argument.type())) {
      traits.tensors |= std::uint64_t{1} << i;
    }
    if (argument.alias_info() && argument.alias_info()->isWrite()) {
      traits.writes |= std::uint64_t{1} << i;
    }
  }
  return traits;
}

// Schemas live as long as their operator is registered. A library that is unloaded and another that reuses the address
// would be told apart by the name; that is not worth a comparison on every call.
const OperatorTraits& cached_traits(const c10::FunctionSchema& schema) {
  struct Slot {
    const c10::FunctionSchema* schema = nullptr;
    OperatorTraits traits;
  };
  thread_local std::array<Slot, 256> slots;
  auto& slot = slots[(reinterpret_cast<std::uintptr_t>(&schema) >> 6) % slots.size()];
  if (slot.schema != &schema) {
    slot.traits = traits_of(schema);
    slot.schema = &schema;
  }
  return slot.traits;
}

// The units an operator holds on to while it runs.
class Pins {
 public:
  explicit Pins(const c10::FunctionSchema& schema) : schema_(schema) {}
  Pins(const Pins&) = delete;
  Pins& operator=(const Pins&) = delete;
  ~Pins() {
    for (const auto& [engine, flat] : pinned_) {
      engine->unpin(*flat);
    }
  }

  void add(const at::Tensor& tensor, bool write) {
    if (!tensor.defined() || !tensor.key_set().has(kPagedKey)) {
      return;
    }
    auto* storage = PagedStorage::of(tensor);
    if (!storage) {
      return;
    }
    auto& owner = storage->owner();
    auto* engine = owner.engine.load(std::memory_order_acquire);
    if (storage->kind() == PageKind::kFull) {
      return;
    }
    if (storage->kind() == PageKind::kShard) {
      if (write && engine) {
        engine->before_shard_write(*owner.flat);
      }
      return;
    }
    TORCH_CHECK_VALUE(
        engine, "[", schema_.name(), "] the parameters of unit '", owner.unit_name,
        "' have no data: the ShardedModel that fully_shard() returned is gone; keep it alive as long as the model");
    if (write && !OwnAccess::active()) {
      engine->check_write(*owner.flat, tensor, schema_.name());
    }
    engine->touch_and_pin(*owner.flat);
    pinned_.emplace_back(engine, owner.flat);
    if (engine->casts_inputs() && c10::isFloatingType(owner.flat->dtype)) {
      cast_to_ = cast_to_ ? c10::promoteTypes(*cast_to_, owner.flat->dtype) : owner.flat->dtype;
    }
  }

  /// The dtype that the operator's other inputs are to have, in mixed precision.
  const std::optional<c10::ScalarType>& cast_to() const {
    return cast_to_;
  }

  /// After the last add(): says so where one operator takes a whole model, as at::_foreach_* and at::cat of all
  /// parameters do.
  void note_width() const {
    if (pinned_.size() <= kNarrow) {
      return;
    }
    std::unordered_set<const Unit*> units;
    for (const auto& [engine, flat] : pinned_) {
      if (!flat->unit->in_place) { // those in place are in memory anyway
        units.insert(flat->unit);
      }
    }
    pinned_.front().first->note_width(schema_.name(), units.size());
  }

 private:
  static constexpr std::size_t kNarrow = 3; ///< So few units are never worth a warning.

  const c10::FunctionSchema& schema_;
  c10::SmallVector<std::pair<Engine*, FlatParameter*>, 4> pinned_;
  std::optional<c10::ScalarType> cast_to_;
};

// Note [Input casts]
// A module has no hook in which its inputs could be converted, as FSDP does. So each operator that uses parameters gets
// its other floating-point inputs in the parameters' dtype. Activations follow: what a bf16 linear returns is bf16. In
// backward every dtype is that of forward already, and nothing is converted.
void cast_inputs(const OperatorTraits& traits, c10::ScalarType to, torch::jit::Stack& stack) {
  if (traits.writes || (torch::autograd::get_current_graph_task_id() != -1 && !at::GradMode::is_enabled())) {
    return;
  }
  const auto wants = [to](const at::Tensor& tensor) {
    return tensor.defined() && tensor.is_floating_point() && tensor.scalar_type() != to && !PagedStorage::of(tensor);
  };
  const auto first = stack.size() - traits.num_arguments;
  for (std::size_t i = 0; i < traits.num_arguments; ++i) {
    if (!(traits.tensors >> i & 1)) {
      continue;
    }
    auto& value = stack[first + i];
    if (value.isTensor()) {
      if (wants(value.toTensor())) {
        value = value.toTensor().to(to);
      }
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      bool any = false;
      for (auto& tensor : tensors) {
        if (wants(tensor)) {
          tensor = tensor.to(to);
          any = true;
        }
      }
      if (any) {
        value = c10::IValue(std::move(tensors));
      }
    }
  }
}

// set_data(), to(dtype) and to(device) all ask this first, with the parameter and what is to replace its data.
void check_replacement(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  const auto& self = torch::jit::peek(stack, 0, 2).toTensor();
  const auto& from = torch::jit::peek(stack, 1, 2).toTensor();
  if (OwnAccess::active() || !self.defined()) {
    return;
  }
  auto* storage = PagedStorage::of(self);
  if (!storage || storage->kind() == PageKind::kShard || (from.defined() && PagedStorage::of(from) == storage)) {
    return;
  }
  auto* engine = storage->owner().engine.load(std::memory_order_acquire);
  const auto name =
      engine ? engine->describe(*storage->owner().flat, self) : "unit '" + storage->owner().unit_name + "'";
  TORCH_CHECK_VALUE(
      false, "[fully_shard] the data of a sharded parameter, ", name, ", cannot be replaced (got ",
      from.defined() ? c10::str(from.dtype(), " on ", from.device()) : std::string("an undefined tensor"),
      "): set_data() and to(dtype or device) belong before fully_shard(); convert the model first");
}

// torch::load() puts what it read under a parameter by set_(). Inside a scope that becomes a copy, which the scope's end
// writes to the shards.
bool copies_instead(torch::jit::Stack* stack) {
  const auto self = torch::jit::peek(*stack, 0, 2).toTensor();
  const auto source = torch::jit::peek(*stack, 1, 2).toTensor();
  auto* storage = PagedStorage::of(self);
  if (!storage || storage->kind() == PageKind::kShard) {
    return false;
  }
  const auto* engine = storage->owner().engine.load(std::memory_order_acquire);
  if (!engine || !storage->owner().flat->unit->in_scope || self.sizes() != source.sizes()) {
    return false;
  }
  {
    const at::NoGradGuard no_grad;
    self.detach().copy_(source);
  }
  torch::jit::drop(*stack, 2);
  stack->emplace_back(self);
  return true;
}

// Optimizers make their state by zeros_like() of what they are given: state of an offloaded shard belongs beside it.
bool makes_offloaded(const c10::FunctionSchema& schema, torch::jit::Stack* stack) {
  const auto num_inputs = schema.arguments().size();
  const auto& self = torch::jit::peek(*stack, 0, num_inputs).toTensor();
  auto* storage = PagedStorage::of(self);
  if (!storage || storage->kind() != PageKind::kShard || self.dim() != 1 || !self.is_contiguous() ||
      !storage->owner().engine.load(std::memory_order_acquire) || !storage->owner().flat->tier) {
    return false;
  }
  for (std::size_t i = 1; i + 1 < num_inputs; ++i) { // dtype, layout, device, pin_memory
    if (!torch::jit::peek(*stack, i, num_inputs).isNone()) {
      return false;
    }
  }
  auto made = storage->owner().flat->tier->zeros(self.numel(), self.scalar_type());
  torch::jit::drop(*stack, num_inputs);
  stack->emplace_back(std::move(made));
  return true;
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& traits = cached_traits(schema);
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kPagedKey);
  if (traits.action == Action::kSet && copies_instead(stack)) {
    return;
  }
  if (traits.action == Action::kLike && makes_offloaded(schema, stack)) {
    return;
  }
  if (traits.action != Action::kPage && traits.action != Action::kSet) {
    if (traits.action == Action::kReplaceData) {
      check_replacement(schema, *stack);
    }
    op.redispatchBoxed(below, stack);
    return;
  }
  Pins pins(schema);
  const auto first = stack->size() - traits.num_arguments;
  for (std::size_t i = 0; i < traits.num_arguments; ++i) {
    if (!(traits.tensors >> i & 1)) {
      continue;
    }
    const bool write = traits.writes >> i & 1;
    const c10::IValue& value = (*stack)[first + i];
    if (value.isTensor()) {
      pins.add(value.toTensor(), write);
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        pins.add(tensor, write);
      }
    } else if (value.isList()) { // Tensor?[]
      for (const c10::IValue& element : value.toListRef()) {
        if (element.isTensor()) {
          pins.add(element.toTensor(), write);
        }
      }
    }
  }
  pins.note_width();
  if (pins.cast_to()) {
    cast_inputs(traits, *pins.cast_to(), *stack);
  }
  op.redispatchBoxed(below, stack);
}

// An operator that returns views and writes nothing needs no bytes; the key still reaches its results. About 90 of aten.
bool only_makes_views(const c10::FunctionSchema& schema) {
  bool aliases = false;
  for (const auto& argument : schema.arguments()) {
    if (argument.alias_info()) {
      if (argument.alias_info()->isWrite()) {
        return false;
      }
      aliases = true;
    }
  }
  // reshape and its kin are CompositeImplicit with an alias annotation: what copies inside them comes here by itself.
  return aliases;
}

thread_local int own_access_depth = 0;

} // namespace

OwnAccess::OwnAccess() {
  ++own_access_depth;
}
OwnAccess::~OwnAccess() {
  --own_access_depth;
}
bool OwnAccess::active() {
  return own_access_depth > 0;
}

void install_fallback() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Never destroyed: at process exit the dispatcher may already be gone.
    static auto* boxed = new torch::Library(torch::Library::IMPL, "_", kPagedKey, __FILE__, __LINE__);
    boxed->fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
    static auto* views = new torch::Library(torch::Library::IMPL, "aten", kPagedKey, __FILE__, __LINE__);
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames()) {
      if (name.name.rfind("aten::", 0) != 0) {
        continue;
      }
      const auto handle = dispatcher.findSchema(name);
      if (handle && only_makes_views(handle->schema())) {
        const auto full_name = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
        views->impl(full_name.c_str(), torch::CppFunction::makeFallthrough());
      }
    }
  });
}

} // namespace ebb::shard
