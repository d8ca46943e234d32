#include "cuda/launch.h"

#include <algorithm>

#include <fmt/format.h>

namespace kda::cuda {
namespace {

constexpr int64_t kMaxGrid = 0x7fffffff;
constexpr std::size_t kSharedWithoutAsking = 48 * 1024;

}  // namespace

Status device_error(const char* what, cudaError_t error) {
  cudaGetLastError();
  const StatusCode code =
      error == cudaErrorMemoryAllocation ? StatusCode::kOutOfMemory : StatusCode::kDeviceError;
  return {code,
          fmt::format("{}: {} ({})", what, cudaGetErrorString(error), cudaGetErrorName(error))};
}

Status launch_raw(const LaunchShape& shape, const void* kernel, void** arguments,
                  cudaStream_t stream) {
  if (shape.tiles <= 0) return {};
  const dim3 grid(static_cast<unsigned>(std::min(shape.tiles, kMaxGrid)));
  const dim3 block(static_cast<unsigned>(shape.threads));
  cudaError_t error = cudaSuccess;
  if (shape.shared_bytes > kSharedWithoutAsking) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shape.shared_bytes));
  }
  if (error == cudaSuccess) {
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = shape.starts_early ? 1 : 0;
    error = cudaLaunchKernelExC(&config, kernel, arguments);
  }
  if (error == cudaSuccess) return {};
  cudaGetLastError();
  if (error == cudaErrorNoKernelImageForDevice) {
    return {StatusCode::kUnsupported,
            fmt::format("kernel {}: this build holds no code for the GPU; rebuild with its "
                        "architecture in CMAKE_CUDA_ARCHITECTURES",
                        shape.name)};
  }
  return {error == cudaErrorMemoryAllocation ? StatusCode::kOutOfMemory : StatusCode::kDeviceError,
          fmt::format("kernel {} (grid {}, {} threads, {} bytes of shared memory): {} ({})",
                      shape.name, grid.x, block.x, shape.shared_bytes, cudaGetErrorString(error),
                      cudaGetErrorName(error))};
}

DeviceGuard::DeviceGuard(int index) {
  int current = -1;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess && current == index) return;
  if (error == cudaSuccess) error = cudaSetDevice(index);
  if (error != cudaSuccess) {
    status_ = device_error(fmt::format("device cuda:{}", index).c_str(), error);
    return;
  }
  previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

}  // namespace kda::cuda
