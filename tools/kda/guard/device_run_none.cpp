#include "guard/device_run.h"

namespace kda::cases {

Status run_on_device(const Plan& /*plan*/, const Args& /*args*/,
                     const std::vector<std::span<std::byte>>& /*regions*/,
                     const DeviceLaunch& /*launch*/) {
  return {StatusCode::kUnsupported, "device memory: this program was built without CUDA"};
}

}  // namespace kda::cases
