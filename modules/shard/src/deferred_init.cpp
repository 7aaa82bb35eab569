#include "ebb/shard/deferred_init.h"

#include "dry_mode.h"
#include "recording.h"

#include <torch/library.h>
#include <torch/torch.h>

#include <mutex>

namespace ebb::shard {
namespace {

thread_local Recording* recording_here = nullptr;

void record_call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kRecordKey);
  if (recording_here) {
    recording_here->call(op, below, stack);
  } else {
    op.redispatchBoxed(below, stack);
  }
}

void install_mode() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Never destroyed: at process exit the dispatcher may already be gone.
    static auto* library = new torch::Library(torch::Library::IMPL, "_", kRecordKey, __FILE__, __LINE__);
    library->fallback(torch::CppFunction::makeFromBoxedFunction<&record_call>());
  });
}

} // namespace

std::shared_ptr<Recording> record(const std::function<void()>& construct) {
  TORCH_CHECK_VALUE(!recording_here, "[deferred_init] called inside another deferred_init(); one is enough");
  if (is_dry()) { // nothing has memory anyway
    construct();
    return std::make_shared<Recording>();
  }
  install_mode();
  auto recording = std::make_shared<Recording>();
  const c10::impl::IncludeDispatchKeyGuard mode(kRecordKey);
  struct Reset {
    ~Reset() {
      recording_here = nullptr;
    }
  } reset;
  recording_here = recording.get();
  construct();
  return recording;
}

void materialize_all(Recording& recording) {
  recording.replay([](const c10::Storage&) { return true; });
}

} // namespace ebb::shard
