// Sixteen bytes of fp32 or bf16 elements, the widest access there is, as floats.
#pragma once

#include "cuda/tile/convert.cuh"

namespace kda::cuda {

template <class T>
struct Vector16 {
  static constexpr int kSize = 16 / static_cast<int>(sizeof(T));

  static __device__ __forceinline__ void unpack(const uint4& bits, float* x) {
    const T* values = reinterpret_cast<const T*>(&bits);
#pragma unroll
    for (int i = 0; i < kSize; ++i) x[i] = to_real<float>(values[i]);
  }

  static __device__ __forceinline__ uint4 pack(const float* x) {
    uint4 bits;
    T* values = reinterpret_cast<T*>(&bits);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = from_real<T>(x[i]);
    return bits;
  }
};

}  // namespace kda::cuda
