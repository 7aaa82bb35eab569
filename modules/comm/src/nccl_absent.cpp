#include "connect_nccl.h"

#include <c10/util/Exception.h>

namespace ebb::comm {

CudaStatus cuda_status() {
  return {.text = "not built with CUDA"};
}

std::shared_ptr<Communicator> connect_nccl(
    const c10::intrusive_ptr<c10d::Store>& /*store*/, std::shared_ptr<Communicator> /*control*/,
    const GroupOptions& /*options*/, std::shared_ptr<Health> /*health*/) {
  C10_THROW_ERROR(
      NotImplementedError,
      "[connect] backend 'nccl' is not in this build; configure it with -DEBB_CUDA=ON and the full set of PyTorch "
      "wheels (preset 'cuda'), or use backend 'gloo'");
}

} // namespace ebb::comm
