#include "cuda/device.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "cuda/device_check.h"

namespace kda {

std::string cuda_device_problem() {
  cuda::DriverFacts facts;
  facts.error = cudaGetDeviceCount(&facts.devices);
  if (facts.error == cudaSuccess && facts.devices > 0) return "";
  cudaGetLastError();  // a failed query must not surface in the caller's next CUDA call
  if (cudaDriverGetVersion(&facts.version) != cudaSuccess) cudaGetLastError();
  return cuda::driver_problem(facts);
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
