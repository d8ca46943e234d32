// bar: named barriers among some warps of a block.
#pragma once

namespace kda::cuda {

/// Until `threads` threads have arrived at barrier `id`; whole warps only. 0 is __syncthreads.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Counts whole warps in without waiting.
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace kda::cuda
