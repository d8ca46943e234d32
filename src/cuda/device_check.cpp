#include "cuda/device_check.h"

#include <fmt/format.h>

#include "cuda/launch.h"

namespace kda::cuda {
namespace {

constexpr int kLeastMajor = 8;  // sm_80: the oldest architecture that is compiled for

}  // namespace

std::string driver_problem(const DriverFacts& facts) {
  if (facts.error == cudaSuccess && facts.devices > 0) return "";
  if (facts.version == 0) return "no CUDA driver is installed";
  if (facts.error == cudaErrorInsufficientDriver) {
    return fmt::format(
        "the CUDA driver supports CUDA {}.{}, this build needs {}.{}; update the driver",
        facts.version / 1000, facts.version % 1000 / 10, CUDART_VERSION / 1000,
        CUDART_VERSION % 1000 / 10);
  }
  if (facts.error == cudaSuccess || facts.error == cudaErrorNoDevice) {
    return "no CUDA device is visible";
  }
  return fmt::format("{} ({})", cudaGetErrorString(facts.error), cudaGetErrorName(facts.error));
}

Status check_device_facts(const DeviceFacts& facts) {
  const int index = facts.device.index;
  if (index < 0 || index >= facts.devices) {
    return {StatusCode::kInvalidArgument,
            fmt::format("device index: found {}, expected 0..{}", index, facts.devices - 1)};
  }
  if (facts.asked != cudaSuccess) {
    return device_error(fmt::format("compute capability of cuda:{}", index).c_str(), facts.asked);
  }
  if (facts.major < kLeastMajor) {
    return {StatusCode::kUnsupported,
            fmt::format("cuda:{} has compute capability {}.{}, {}.0 or more is needed", index,
                        facts.major, facts.minor, kLeastMajor)};
  }
  switch (facts.code) {
    case cudaSuccess:
      return {};
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
      return {StatusCode::kUnsupported,
              fmt::format("this build holds no code for compute capability {}.{}; rebuild with it "
                          "in CMAKE_CUDA_ARCHITECTURES",
                          facts.major, facts.minor)};
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilerNotFound:
      return {
          StatusCode::kUnsupported,
          fmt::format("this build holds only PTX for compute capability {}.{}, which the driver "
                      "cannot compile ({}); update the driver, or rebuild with {}{}-real in "
                      "CMAKE_CUDA_ARCHITECTURES",
                      facts.major, facts.minor, cudaGetErrorString(facts.code), facts.major,
                      facts.minor)};
    default:
      return device_error(fmt::format("device cuda:{}", index).c_str(), facts.code);
  }
}

Status check_address_facts(std::string_view name, const void* address, const AddressFacts& facts,
                           const Device& device) {
  if (facts.error != cudaSuccess) {
    return device_error(fmt::format("{}: address {}", name, address).c_str(), facts.error);
  }
  if (facts.attributes.type == cudaMemoryTypeDevice && facts.attributes.device != device.index) {
    return {StatusCode::kInvalidArgument,
            fmt::format("{}: its memory is on cuda:{}, expected the plan's device cuda:{}", name,
                        facts.attributes.device, device.index)};
  }
  if (facts.attributes.type != cudaMemoryTypeUnregistered || facts.pageable) return {};
  return {StatusCode::kInvalidArgument,
          fmt::format("{}: address {} is memory that CUDA does not know (host memory, or freed), "
                      "expected memory of cuda:{}",
                      name, address, device.index)};
}

}  // namespace kda::cuda
