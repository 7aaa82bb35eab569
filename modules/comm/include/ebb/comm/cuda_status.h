#pragma once

#include <string>

namespace ebb::comm {

/// What the CUDA backend of this build can do on this machine.
struct CudaStatus {
  bool built = false; ///< The NCCL backend is in this build.
  int num_gpus = 0; ///< That this process can see; 0 when not built.
  std::string text; ///< "built with CUDA and NCCL 2.30.7, no GPU"
};
/// Asks the build and, where it has CUDA, the driver. Not collective.
CudaStatus cuda_status();

} // namespace ebb::comm
