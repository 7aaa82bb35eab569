#include "ebb/comm/init.h"

#include "socket_communicator.h"

#include <c10/util/Exception.h>

namespace ebb::comm {

std::shared_ptr<Communicator> connect(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const GroupOptions& options) {
  TORCH_CHECK_VALUE(
      size >= 1 && rank >= 0 && rank < size, "[connect] expected a rank in [0, size), got rank ", rank, " of ", size);
  if (size == 1 || options.backend == "single") {
    TORCH_CHECK_VALUE(size == 1, "[connect] backend 'single' is for one rank, got ", size, "; use 'gloo' or 'auto'");
    return single();
  }
  return std::make_shared<SocketCommunicator>(store, rank, size, options, true);
}

} // namespace ebb::comm
