#include "cuda/launch.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>

#include <fmt/format.h>

namespace kda::cuda {
namespace {

constexpr int64_t kMaxGrid = 0x7fffffff;
constexpr std::size_t kSharedWithoutAsking = std::size_t{48} << 10;

/// How much shared memory each kernel was allowed on each device, so that the driver is asked once.
/// A kernel or device beyond the table asks at every launch.
class SharedMemoryLimits {
 public:
  cudaError_t raise(const void* kernel, std::size_t bytes) {
    int device = 0;
    if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
    std::atomic<std::size_t>* const allowed = find(kernel, device);
    if (allowed != nullptr && allowed->load(std::memory_order_acquire) >= bytes) {
      return cudaSuccess;
    }
    const std::lock_guard lock(mutex_);  // or a smaller request could overtake a larger one
    if (allowed != nullptr && allowed->load(std::memory_order_relaxed) >= bytes) {
      return cudaSuccess;
    }
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (error == cudaSuccess && allowed != nullptr) {
      allowed->store(bytes, std::memory_order_release);
    }
    return error;
  }

 private:
  static constexpr int kKernels = 128;
  static constexpr int kDevices = 16;
  struct Entry {
    std::atomic<const void*> kernel{nullptr};
    std::array<std::atomic<std::size_t>, kDevices> allowed{};
  };

  std::atomic<std::size_t>* find(const void* kernel, int device) {
    if (device >= kDevices) return nullptr;
    const std::size_t hash = reinterpret_cast<std::uintptr_t>(kernel) / 16;
    for (std::size_t step = 0; step < kKernels; ++step) {
      Entry& entry = entries_[(hash + step) % kKernels];
      const void* owner = nullptr;
      if (entry.kernel.compare_exchange_strong(owner, kernel) || owner == kernel) {
        return &entry.allowed[static_cast<std::size_t>(device)];
      }
    }
    return nullptr;
  }

  std::array<Entry, kKernels> entries_;
  std::mutex mutex_;
};

SharedMemoryLimits& shared_memory_limits() {
  static SharedMemoryLimits limits;
  return limits;
}

/// Faults of a kernel, after which every CUDA call of the process fails.
bool loses_context(cudaError_t error) {
  switch (error) {
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalAddress:
    case cudaErrorIllegalInstruction:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorMisalignedAddress:
    case cudaErrorNvlinkUncorrectable:
      return true;
    default:
      return false;
  }
}

/// What to do about it, as the end of a message.
const char* advice(cudaError_t error) {
  if (loses_context(error)) {
    return "; a kernel that ran before, of whatever library, left the CUDA context unusable: "
           "restart the process";
  }
  if (error == cudaErrorInitializationError) {
    return "; a child of a fork cannot use CUDA after its parent did: start it anew (spawn)";
  }
  return "";
}

}  // namespace

Status device_error(const char* what, cudaError_t error) {
  cudaGetLastError();
  const StatusCode code =
      error == cudaErrorMemoryAllocation ? StatusCode::kOutOfMemory : StatusCode::kDeviceError;
  return {code, fmt::format("{}: {} ({}){}", what, cudaGetErrorString(error),
                            cudaGetErrorName(error), advice(error))};
}

Status launch_raw(const LaunchShape& shape, const void* kernel, void** arguments,
                  cudaStream_t stream) {
  if (shape.tiles <= 0) return {};
  const dim3 grid(static_cast<unsigned>(std::min(shape.tiles, kMaxGrid)));
  const dim3 block(static_cast<unsigned>(shape.threads));
  cudaError_t error = cudaSuccess;
  if (shape.shared_bytes > kSharedWithoutAsking) {
    error = shared_memory_limits().raise(kernel, shape.shared_bytes);
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
  if (error == cudaErrorNoKernelImageForDevice) {
    cudaGetLastError();
    return {StatusCode::kUnsupported,
            fmt::format("kernel {}: this build holds no code for the GPU; rebuild with its "
                        "architecture in CMAKE_CUDA_ARCHITECTURES",
                        shape.name)};
  }
  return device_error(fmt::format("kernel {} (grid {}, {} threads, {} bytes of shared memory)",
                                  shape.name, grid.x, block.x, shape.shared_bytes)
                          .c_str(),
                      error);
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
