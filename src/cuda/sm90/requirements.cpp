#include "cuda/sm90/requirements.h"

#include <cstddef>
#include <cstdint>

#include <fmt/format.h>

#include "cuda/executor.h"

namespace kda::cuda::sm90 {

namespace {

Status check_capability(const Device& device) {
  if (Status status = check_device(device); !status.ok()) return status;
  int major = 0;
  int minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.index);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device.index);
  if (major == 9) return {};
  return {StatusCode::kUnsupported, fmt::format("compute capability {}.{} (9.0)", major, minor)};
}

}  // namespace

Status check_hopper(const Device& device, const std::string& obstacle) {
  Status status = check_capability(device);
  if (obstacle.empty()) return status;
  if (status.ok()) return {StatusCode::kUnsupported, obstacle};
  if (status.code() != StatusCode::kUnsupported) return status;
  return {StatusCode::kUnsupported, fmt::format("{}, and {}", status.message(), obstacle)};
}

int32_t sm_count(const Device& device) {
  int sms = 0;
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device.index);
  return sms;
}

int32_t sm_count() {
  Device current{DeviceType::kCuda, 0};
  cudaGetDevice(&current.index);
  return sm_count(current);
}

std::string dtype_obstacle(const Problem& problem, std::initializer_list<TensorId> as_q,
                           std::initializer_list<TensorId> states) {
  const DType io = problem[TensorId::kQ].dtype;
  if (io != DType::kBF16 && io != DType::kF16) return fmt::format("{} tensors (q)", name_of(io));
  for (const TensorId id : as_q) {
    const DType dtype = problem[id].dtype;
    if (problem.has(id) && dtype != io) {
      return fmt::format("{} tensors beside {} ones ({})", name_of(dtype), name_of(io),
                         name_of(id));
    }
  }
  for (const TensorId id : states) {
    const DType dtype = problem[id].dtype;
    if (problem.has(id) && dtype != DType::kF32 && dtype != io) {
      return fmt::format("{} tensors ({})", name_of(dtype), name_of(id));
    }
  }
  return computes_in_fp64(problem) ? "fp64 tensors" : "";
}

std::string uneven_rows(const Problem& problem, std::initializer_list<TensorId> ids) {
  constexpr int64_t kRowBytes = 16;
  for (const TensorId id : ids) {
    if (!problem.has(id)) continue;
    const TensorLayout& t = problem[id];
    const auto bytes = static_cast<int64_t>(size_of(t.dtype));
    for (std::size_t i = 0; i < 4; ++i) {
      if (i == 3 ? t.stride[i] != 1 : t.shape[i] > 1 && t.stride[i] * bytes % kRowBytes != 0) {
        return fmt::format("rows apart from {} bytes ({})", kRowBytes, name_of(id));
      }
    }
  }
  return "";
}

}  // namespace kda::cuda::sm90
