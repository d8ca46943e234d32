// One key channel of a chunk's rows a thread.
#pragma once

#include "cuda/tile/convert.cuh"

namespace kda::cuda {

inline constexpr int kGateThreads = 256;
/// Rows whose loads are in flight together.
inline constexpr int kGateBatch = 8;

/// Threads for K channels: whole warps.
inline int32_t channel_threads(int32_t K) { return (K + 31) / 32 * 32; }

/// Rows base.. of one channel, the last valid row again beyond it.
template <class Real>
__device__ __forceinline__ void load_batch(Real (&x)[kGateBatch], const Tensor& t, int64_t offset,
                                           int base, int rows) {
  with_element(t.dtype, [&]<class T>(Element<T>) {
    const T* data = static_cast<const T*>(t.data) + offset;
#pragma unroll
    for (int j = 0; j < kGateBatch; ++j) {
      const int i = base + j < rows ? base + j : rows - 1;
      x[j] = to_real<Real>(data[i * t.stride[1]]);
    }
  });
}

}  // namespace kda::cuda
