// Completion of asynchronous copies on an mbarrier (what libcu++'s cuda::ptx lacks).
#pragma once

#include <cstdint>

namespace kda::cuda {

/// 16 bytes, or 16 zeros where `valid` is false; both addresses aligned to 16.
__device__ __forceinline__ void copy_async_16_or_zero(uint32_t shared, const void* global,
                                                      bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}

/// One arrival of this thread on `barrier` once its copies so far have landed.
__device__ __forceinline__ void arrive_after_copies(uint64_t* barrier) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address) : "memory");
}

}  // namespace kda::cuda
