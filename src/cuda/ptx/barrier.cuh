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

/// barrier_sync that tells all threads whether one of them has found something.
__device__ __forceinline__ bool barrier_any(int id, int threads, bool found) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred one, all;\n"
      "setp.ne.s32 one, %1, 0;\n"
      "bar.red.or.pred all, %2, %3, one;\n"
      "selp.s32 %0, 1, 0, all;\n"
      "}\n"
      : "=r"(any)
      : "r"(static_cast<int>(found)), "r"(id), "r"(threads)
      : "memory");
  return any != 0;
}

}  // namespace kda::cuda
