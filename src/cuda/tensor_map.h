// Descriptors of tensors for TMA.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>

#include "cuda/params.h"
#include "kda/status.h"

namespace kda::cuda {

/// Dimensions of a tensor with 16-bit elements, innermost first; stride[0] is 1.
struct TensorMapShape {
  std::array<int64_t, 4> extent;
  std::array<int64_t, 4> stride;  ///< in elements
  std::array<int32_t, 4> box;     ///< elements of a copy; box[0] is 64: one line of the swizzle
};

/// Fills `map` for the tensor with the 128-byte swizzle of cuda/tile/swizzle.cuh: what lies outside
/// the extents is read as zero and not written. Encoding is arithmetic on the host , so nothing is
/// cached. kDeviceError if the driver refuses.
Status make_tensor_map(CUtensorMap& map, const char* name, const Tensor& tensor,
                       const TensorMapShape& shape);

/// "" or what in the layout TMA cannot address. The address, too, must be a multiple of 16.
const char* tensor_map_obstacle(const TensorMapShape& shape);

}  // namespace kda::cuda
