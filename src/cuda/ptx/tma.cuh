// Copies of boxes of rank-4 tensors between global and shared memory with a hint for L2, which
// cuda::ptx lacks.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace kda::cuda {

/// Coordinates of a box, innermost dimension first.
struct BoxAt {
  int32_t x, y, z, w;
};

/// What L2 shall do with the lines of a copy.
__device__ __forceinline__ uint64_t l2_evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t l2_evict_last() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// Completes bytes on `barrier`.
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap& map, const BoxAt& at,
                                         uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(
          static_cast<uint32_t>(__cvta_generic_to_shared(to))),
      "l"(&map), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w),
      "r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier))), "l"(policy)
      : "memory");
}

/// Belongs to the current bulk group of this thread.
__device__ __forceinline__ void tma_store(const CUtensorMap& map, const BoxAt& at, const void* from,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group.L2::cache_hint"
      " [%0, {%1, %2, %3, %4}], [%5], %6;" ::"l"(&map),
      "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w),
      "r"(static_cast<uint32_t>(__cvta_generic_to_shared(from))), "l"(policy)
      : "memory");
}

}  // namespace kda::cuda
