#include "support/device_run.h"

namespace kda::test {

Status run_on_device(const Plan& /*plan*/, const Args& /*args*/,
                     const std::vector<std::span<std::byte>>& /*regions*/, bool /*captured*/) {
  return {StatusCode::kUnsupported, "device memory: these tests were built without CUDA"};
}

}  // namespace kda::test
