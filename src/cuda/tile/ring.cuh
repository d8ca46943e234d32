// A ring of stages in shared memory between warps that fill and warps that empty it.
#pragma once

#include <cuda/ptx>

#include <cstdint>

namespace kda::cuda {

/// The stage whose turn it is and the parity of the round.
template <int Stages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == Stages) {
      stage = 0;
      parity ^= 1;
    }
  }

  /// For warps that take turns; at most one round.
  __device__ __forceinline__ void advance_by(int steps) {
    stage += steps;
    if (stage < Stages) return;
    stage -= Stages;
    parity ^= 1;
  }
};

/// Until the phase of this parity is over. Whoever fills waits with the parity of the round before,
/// which at the start counts as over.
__device__ __forceinline__ void wait_for(uint64_t* barrier, uint32_t parity) {
  while (!::cuda::ptx::mbarrier_try_wait_parity(barrier, parity)) {
  }
}

/// A phase of a barrier.
struct Phase {
  uint64_t* barrier;
  uint32_t parity;
};
__device__ __forceinline__ void wait_for(const Phase& phase) {
  wait_for(phase.barrier, phase.parity);
}
__device__ __forceinline__ bool is_over(const Phase& phase) {
  return ::cuda::ptx::mbarrier_test_wait_parity(phase.barrier, phase.parity);
}

/// Makes this thread's writes to shared memory visible to TMA and wgmma: before the barrier that
/// precedes their reads.
__device__ __forceinline__ void publish_to_async_proxy() {
  ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
}

}  // namespace kda::cuda
