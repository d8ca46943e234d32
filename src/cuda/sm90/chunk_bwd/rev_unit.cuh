// The unit of the reverse scan in fp16, whose range gradients exceed at both ends: a loss is scaled
// up to the limit of its dtype, the gradient of a state is a sum over all later tokens, and what a
// long stretch of masked tokens leaves is far smaller.
//
// A warpgroup's columns of V keep everything that is linear in (do, dfinal_state) in a unit of
// their own, a power of two that moves with the walk: D and do / unit enter each chunk below
// kMostInUnit. With |q|, |k| <= 1 and beta <= 2 what the chunk makes of them stays in range: a
// column of dv below (32 + sqrt(K)) 8 < 350, one of R below 65 times that, beta R below 2^16.
// What is at least 2^-13 of the largest in a chunk and 64 columns keeps all 11 bits.
#pragma once

#include <cstdint>

#include "cuda/sm90/chunk_fwd/scan.cuh"

namespace kda::cuda::sm90 {

inline constexpr float kMostInUnit = 8;
inline constexpr float kLeastInUnit = 0.5f;
/// Units are 2^-kUnitRange to 2^kUnitRange, so that the quotient of two is an ordinary number.
inline constexpr int kUnitRange = 50;

/// The unit of columns in which `largest` is the largest number in `unit` so far: between 2 and 4
/// if it was out of range. Zero and infinity change nothing.
__device__ __forceinline__ float fitted_unit(float unit, float largest) {
  const bool fits = largest <= kMostInUnit && largest >= kLeastInUnit;
  if (fits || largest == 0 || largest > 3e38f) return unit;
  const int now = static_cast<int>(__float_as_uint(unit) >> 23);
  const int shift = static_cast<int>(__float_as_uint(largest) >> 23) - 127 - 1;
  const int next = min(max(now + shift, 127 - kUnitRange), 127 + kUnitRange);
  return __uint_as_float(static_cast<uint32_t>(next) << 23);
}

/// The largest |x| of a warpgroup; NaN does not count. `turn` alternates between calls.
template <class Consumer>
__device__ __forceinline__ float largest_of_group(const Consumer& consumer, float x, int turn) {
  __shared__ float largest[2][kMostGroups][4];
  float(&own)[4] = largest[turn][consumer.group];
  const uint32_t of_warp = __reduce_max_sync(~0u, __float_as_uint(x));
  if (consumer.thread % 32 == 0) own[consumer.thread / 32] = __uint_as_float(of_warp);
  consumer.sync();
  return fmaxf(fmaxf(own[0], own[1]), fmaxf(own[2], own[3]));
}

}  // namespace kda::cuda::sm90
