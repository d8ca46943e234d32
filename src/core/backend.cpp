// The ordered list of implementations and the devices of this machine.
#include "kda/backend.h"

#include "core/executor.h"
#include "cpu/cpu_info.h"
#if KDA_HAS_CUDA
#include "cuda/device.h"
#endif

namespace kda {

std::span<const Implementation> all_implementations() {
  static const std::vector<Implementation> rows = [] {
    std::vector<Implementation> all;
    for (std::span<const Implementation> part : {
#if KDA_HAS_CUDA
           cuda_implementations(),
#endif
               cpu_implementations(), reference_implementations()
         }) {
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  }();
  return rows;
}

std::vector<ImplementationInfo> implementations() {
  std::vector<ImplementationInfo> infos;
  for (const Implementation& row : all_implementations()) {
    infos.push_back({row.name, row.family, row.operation, row.device, row.features});
  }
  return infos;
}

std::vector<DeviceInfo> devices() {
  std::vector<DeviceInfo> all{cpu_device_info()};
#if KDA_HAS_CUDA
  for (DeviceInfo& info : cuda_device_infos()) all.push_back(std::move(info));
#endif
  return all;
}

std::string cuda_unavailable_reason() {
#if KDA_HAS_CUDA
  return cuda_device_problem();
#else
  return "this build has no CUDA (configured with KDA_CUDA=OFF, or no CUDA compiler was found)";
#endif
}

}  // namespace kda
