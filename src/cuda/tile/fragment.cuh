// Register fragments of wgmma: accumulators [64 x N] of a warpgroup, and pairs of 16-bit elements.
//
// Warp w of the warpgroup holds rows 16 w .. 16 w + 15. Lane l holds, of every eight columns 8 i
// .., (row l / 4, columns 8 i + 2 (l % 4) and the next) in registers 4 i, 4 i + 1 and the same
// columns of row l / 4 + 8 in 4 i + 2, 4 i + 3. Packed in pairs in this order, sixteen columns are
// the four registers of an A operand.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/tile/swizzle.cuh"

namespace kda::cuda {

template <class T16>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (__is_same(T16, __half)) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

template <class T16>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  if constexpr (__is_same(T16, __half)) {
    return __half22float2(reinterpret_cast<const __half2&>(pair));
  } else {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  }
}

/// Where the lane's elements of an accumulator lie.
struct FragmentLane {
  int row;     ///< of its registers 0, 1; its registers 2, 3 are 8 rows below
  int column;  ///< of its registers 0, 2; the next one of registers 1, 3

  __host__ __device__ FragmentLane(int warp, int lane)
      : row(16 * warp + lane / 4), column(2 * (lane % 4)) {}
};

/// The addresses at which ldmatrix and stmatrix, transposing, meet packed accumulators: memory
/// holds [columns][64 rows] of the fragment in one panel.
struct TransposedLane {
  int line;  ///< memory row of this lane for the first sixteen columns
  int unit;

  __host__ __device__ TransposedLane(int warp, int lane)
      : line(lane % 8 + lane / 16 * 8), unit(2 * warp + lane / 8 % 2) {}

  /// Offset in the panel for columns 16 step ...
  __host__ __device__ uint32_t offset(int step) const {
    return unit_offset(line, unit) + static_cast<uint32_t>(16 * step * kPanelRowBytes);
  }
};

}  // namespace kda::cuda
