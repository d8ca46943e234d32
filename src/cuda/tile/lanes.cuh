// Vectors of up to 256 channels held by one warp.
#pragma once

#include "cuda/tile/convert.cuh"

namespace kda::cuda {

inline constexpr int kMaxLaneChannels = 256;

/// A lane's channels lane, lane + 32, ... of a vector.
template <class Real>
using Lanes = Real[kMaxLaneChannels / 32];

/// Elements at base; 0 from K on.
template <class Real>
__device__ __forceinline__ void load_lanes(Lanes<Real>& x, const Tensor& t, int64_t base,
                                           int32_t K) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  with_element(t.dtype, [&]<class T>(Element<T>) {
    const T* data = static_cast<const T*>(t.data) + base;
#pragma unroll
    for (int j = 0; j < kMaxLaneChannels / 32; ++j) {
      const int k = lane + 32 * j;
      x[j] = k < K ? to_real<Real>(data[k * t.stride[3]]) : Real(0);
    }
  });
}

template <class Real>
__device__ __forceinline__ Real warp_sum(Real x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

/// (3.1).
inline constexpr double kNormEps = 1e-6;

}  // namespace kda::cuda
