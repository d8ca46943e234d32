#include "cuda/device.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

namespace kda {

std::string cuda_device_problem() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return "";
  cudaGetLastError();  // a failed query must not surface in the caller's next CUDA call
  int driver = 0;
  if (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0) {
    return "no CUDA driver is installed";
  }
  if (error == cudaErrorInsufficientDriver) {
    return fmt::format(
        "the CUDA driver supports CUDA {}.{}, this build needs {}.{}; update the "
        "driver",
        driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
  }
  return error == cudaSuccess ? "no CUDA device is visible" : cudaGetErrorString(error);
}

std::vector<DeviceInfo> cuda_device_infos() {
  std::vector<DeviceInfo> infos;
  int count = 0;
  if (!cuda_device_problem().empty() || cudaGetDeviceCount(&count) != cudaSuccess) return infos;
  for (int index = 0; index < count; ++index) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, index) != cudaSuccess) {
      cudaGetLastError();
      continue;
    }
    infos.push_back({{DeviceType::kCuda, index},
                     properties.name,
                     fmt::format("compute capability {}.{}; {} SMs", properties.major,
                                 properties.minor, properties.multiProcessorCount),
                     properties.totalGlobalMem});
  }
  return infos;
}

}  // namespace kda
