// What a driver, a device and an address must be: verdicts on facts, which tests can make up.
#pragma once

#include <string>
#include <string_view>

#include <cuda_runtime_api.h>

#include "kda/status.h"
#include "kda/types.h"

namespace kda::cuda {

/// Answers of cudaGetDeviceCount and cudaDriverGetVersion.
struct DriverFacts {
  cudaError_t error = cudaSuccess;
  int devices = 0;
  int version = 0;  ///< 1000 major + 10 minor; 0 without a driver
};

/// Why no device can be used, with what to do; empty if one can.
std::string driver_problem(const DriverFacts& facts);

struct DeviceFacts {
  Device device;
  int devices = 0;
  int major = 0;  ///< compute capability
  int minor = 0;
  cudaError_t asked = cudaSuccess;  ///< of asking for it
  cudaError_t code = cudaSuccess;   ///< of asking for the attributes of a kernel of this build
};

/// OK if kernels of this build can run there.
Status check_device_facts(const DeviceFacts& facts);

struct AddressFacts {
  cudaError_t error = cudaSuccess;
  cudaPointerAttributes attributes{};
  bool pageable = false;  ///< the device reads ordinary host memory
};

/// OK if kernels on `device` may use the address.
Status check_address_facts(std::string_view name, const void* address, const AddressFacts& facts,
                           const Device& device);

}  // namespace kda::cuda
