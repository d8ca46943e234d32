// Sixteen bytes of fp32 or bf16 elements, the widest access there is, as floats.
#pragma once

#include "cuda/tile/convert.cuh"

namespace kda::cuda {

template <class T>
struct Vector16 {
  static_assert(__is_same(T, float) || __is_same(T, __nv_bfloat16));
  static constexpr int kSize = 16 / static_cast<int>(sizeof(T));

  /// By value: through a reference the compiler reads element by element, four or eight times the
  /// instructions and, from shared memory, with bank conflicts.
  static __device__ __forceinline__ void unpack(uint4 bits, float* x) {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        x[i] = __uint_as_float(words[i]);
      } else {
        x[2 * i] = __uint_as_float(words[i] << 16);
        x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000U);
      }
    }
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
