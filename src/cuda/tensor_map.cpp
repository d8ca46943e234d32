#include "cuda/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <algorithm>

#include <fmt/format.h>

#include "cuda/launch.h"
#include "kda/types.h"

namespace kda::cuda {
namespace {

constexpr int64_t kElementBytes = 2;
constexpr int64_t kAlignment = 16;
constexpr int64_t kMostExtent = int64_t{1} << 31;  // coordinates are int32
constexpr int64_t kMostStrideBytes = int64_t{1} << 40;
constexpr unsigned kEncodeVersion = 12000;

using Encode = PFN_cuTensorMapEncodeTiled_v12000;

/// From the driver that is loaded, so that the library needs no libcuda at link time.
struct Driver {
  Encode encode = nullptr;
  Status status;
};
Driver find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      "cuTensorMapEncodeTiled", &function, kEncodeVersion, cudaEnableDefault, &found);
  if (error != cudaSuccess) return {nullptr, device_error("cuTensorMapEncodeTiled", error)};
  if (found != cudaDriverEntryPointSuccess || function == nullptr) {
    return {nullptr,
            {StatusCode::kDeviceError,
             "the CUDA driver has no cuTensorMapEncodeTiled; update it to CUDA 12 or later"}};
  }
  return {reinterpret_cast<Encode>(function), {}};
}

}  // namespace

Status make_tensor_map(CUtensorMap& map, const char* name, const Tensor& tensor,
                       const TensorMapShape& shape) {
  static const Driver driver = find_encode();
  if (!driver.status.ok()) return driver.status;
  std::array<cuuint64_t, 4> extent{};
  std::array<cuuint64_t, 3> stride_bytes{};
  std::array<cuuint32_t, 4> box{};
  constexpr std::array<cuuint32_t, 4> kStep{1, 1, 1, 1};
  for (std::size_t i = 0; i < 4; ++i) {
    extent[i] = static_cast<cuuint64_t>(shape.extent[i]);
    box[i] = static_cast<cuuint32_t>(shape.box[i]);
    // Nothing steps along a dimension of one entry; its stride may be none that TMA takes.
    const int64_t bytes = shape.extent[i] > 1 ? shape.stride[i] * kElementBytes : kAlignment;
    if (i > 0) stride_bytes[i - 1] = static_cast<cuuint64_t>(bytes);
  }
  const bool fp16 = tensor.dtype == static_cast<int32_t>(DType::kF16);
  const CUresult result =
      driver.encode(&map, fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                    4, tensor.data, extent.data(), stride_bytes.data(), box.data(), kStep.data(),
                    CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return {StatusCode::kDeviceError,
          fmt::format("{}: cuTensorMapEncodeTiled refused it with error {}", name,
                      static_cast<int>(result))};
}

const char* tensor_map_obstacle(const TensorMapShape& shape) {
  if (shape.stride[0] != 1) return "elements of a row that are apart";
  for (std::size_t i = 0; i < 4; ++i) {
    if (shape.extent[i] >= kMostExtent) return "an extent of 2^31 or more";
    if (i == 0 || shape.extent[i] <= 1) continue;
    if (shape.stride[i] <= 0) return "a repeated dimension (stride 0)";
    if (shape.stride[i] * kElementBytes % kAlignment != 0) return "rows apart from 16 bytes";
    if (shape.stride[i] * kElementBytes >= kMostStrideBytes) return "a stride of 2^40 bytes";
  }
  return "";
}

}  // namespace kda::cuda
