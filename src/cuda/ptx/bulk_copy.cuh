// Completion of asynchronous copies on an mbarrier (what libcu++'s cuda::ptx lacks).
#pragma once

#include <cuda.h>

#include <cstdint>

namespace kda::cuda {

/// Brings the box of `map` at coordinates `at` into L2.
__device__ __forceinline__ void prefetch_tensor(const CUtensorMap* map, const int32_t (&at)[4]) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map),
               "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3])
               : "memory");
}

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
