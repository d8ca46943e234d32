// cp.async: copies from global to shared memory that bypass registers (sm_80 on).
#pragma once

#include <cstdint>

namespace kda::cuda {

/// 16 bytes, both addresses aligned to 16.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
  const auto to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}

/// The same; `shared` in the shared window.
__device__ __forceinline__ void copy_async_16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

/// The same of what is needed once: L2 gives its place away first.
__device__ __forceinline__ void copy_async_16_once(uint32_t shared, const void* global) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared),
               "l"(global), "l"(policy)
               : "memory");
}

/// 16 bytes, or 16 zeros where `valid` is false; both addresses aligned to 16.
__device__ __forceinline__ void copy_async_16_or_zero(uint32_t shared, const void* global,
                                                      bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}

/// Ends a group of this thread's copies.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Until at most N groups of this thread are in flight.
template <int N>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

}  // namespace kda::cuda
