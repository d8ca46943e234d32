// One checked way to start a kernel.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "kda/status.h"

namespace kda::cuda {

/// A kernel's name and geometry. Kernels loop over tiles in steps of the grid, so a count beyond
/// the largest grid is no error.
struct LaunchShape {
  const char* name;
  int64_t tiles;
  int32_t threads;
  std::size_t shared_bytes = 0;
  /// The kernel may start before the one ahead of it in the stream has ended, and waits for it by
  /// cudaGridDependencySynchronize (sm_90 on).
  bool starts_early = false;
};

/// Raises the shared memory limit where needed and launches. Nothing happens for 0 tiles.
/// kDeviceError (kUnsupported if this build has no code for the GPU) names kernel and geometry.
Status launch_raw(const LaunchShape& shape, const void* kernel, void** arguments,
                  cudaStream_t stream);

template <class Params>
Status launch(const LaunchShape& shape, void (*kernel)(Params), Params params,
              cudaStream_t stream) {
  void* arguments[] = {&params};
  return launch_raw(shape, reinterpret_cast<const void*>(kernel), arguments, stream);
}

/// A CUDA error as a status; clears it, so that the caller's next CUDA call does not report it.
Status device_error(const char* what, cudaError_t error);

/// Makes `index` the current device and restores the caller's on destruction.
class DeviceGuard {
 public:
  explicit DeviceGuard(int index);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  const Status& status() const { return status_; }

 private:
  int previous_ = -1;
  Status status_;
};

}  // namespace kda::cuda
