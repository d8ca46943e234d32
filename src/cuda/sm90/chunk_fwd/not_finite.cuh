// v that is not finite in scan, by packed fragments [64 v x 32 tokens]. The products with T and P
// run over all tokens of a chunk, earlier ones with factor 0 for later ones, and zero times NaN is
// NaN. So such elements enter as zeros, and o of their columns becomes NaN afterwards, from their
// token on. What k, gates and beta do alike, prep contains (solve.cuh).
#pragma once

#include "cuda/sm90/chunk_fwd/config.h"
#include "cuda/tile/fragment.cuh"

namespace kda::cuda::sm90 {

/// The exponent of infinity and NaN.
template <class Io>
inline constexpr uint32_t kNotFinite = __is_same(Io, __half) ? 0x7c00 : 0x7f80;

/// Whether any of the warp's elements is not finite: its product with 0 is NaN.
template <class Io>
__device__ __forceinline__ bool any_not_finite(const uint32_t (&x)[8]) {
  uint32_t nothing = 0;
#pragma unroll
  for (const uint32_t pair : x) {
    if constexpr (__is_same(Io, __half)) {
      asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(nothing) : "r"(pair), "r"(0));
    } else {
      asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(nothing) : "r"(pair), "r"(0));
    }
  }
  return __any_sync(~0u, (nothing & 0x7fff7fffu) != 0) != 0;
}

template <int N>
__device__ __forceinline__ bool all_finite(const float (&x)[N]) {
  float nothing = 0;
#pragma unroll
  for (const float value : x) nothing = fmaf(value, 0, nothing);
  return nothing == 0;
}

/// Zeros in the place of elements that are not finite. Later tokens, which may read them, read 0
/// too: they get their NaN by spoil_from.
template <class Io>
__device__ __forceinline__ void clear_not_finite(uint32_t (&x)[8]) {
  constexpr uint32_t kHigh = kNotFinite<Io> << 16;
#pragma unroll
  for (uint32_t& pair : x) {
    if ((pair & kNotFinite<Io>) == kNotFinite<Io>) pair &= 0xffff0000u;
    if ((pair & kHigh) == kHigh) pair &= 0xffffu;
  }
}

/// The first token whose element is not finite in each of the lane's rows; kChunk: none.
template <class Io>
__device__ __forceinline__ void first_not_finite(int (&first)[2], const uint32_t (&x)[8],
                                                 const FragmentLane& at) {
  first[0] = first[1] = kChunk;
#pragma unroll
  for (int i = 7; i >= 0; --i) {
    const int token = i / 2 * 8 + at.column;
    if ((x[i] >> 16 & kNotFinite<Io>) == kNotFinite<Io>) first[i % 2] = token + 1;
    if ((x[i] & kNotFinite<Io>) == kNotFinite<Io>) first[i % 2] = token;
  }
  for (int& token : first) {
    token = min(token, __shfl_xor_sync(~0u, token, 1));
    token = min(token, __shfl_xor_sync(~0u, token, 2));
  }
}

/// NaN, with the bits that arithmetic gives it, from those tokens on.
__device__ __forceinline__ void spoil_from(const int (&first)[2], uint32_t (&x)[8],
                                           const FragmentLane& at) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int token = i / 2 * 8 + at.column;
    if (token >= first[i % 2]) x[i] = (x[i] & 0xffff0000u) | 0x7fffu;
    if (token + 1 >= first[i % 2]) x[i] = (x[i] & 0xffffu) | 0x7fff0000u;
  }
}

}  // namespace kda::cuda::sm90
