// bar.sync on a barrier of its own: some warps of a block wait for each other.
#pragma once

namespace kda::cuda {

/// `id` 1..15 (0 is __syncthreads), `threads` a multiple of 32.
__device__ __forceinline__ void sync_named(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace kda::cuda
