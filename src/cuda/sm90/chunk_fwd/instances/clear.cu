#include "cuda/sm90/chunk_fwd/instances/instances.h"

namespace kda::cuda::sm90 {

// Grid: any; each thread clears words in steps of the grid. What follows may start at once and
// waits for this kernel itself.
__global__ void __launch_bounds__(kClearThreads)
    sm90_chunk_fwd_clear(const __grid_constant__ ClearParams p) {
  cudaTriggerProgrammaticLaunchCompletion();
  for (int64_t i = blockIdx.x * int64_t{kClearThreads} + threadIdx.x; i < p.count;
       i += gridDim.x * int64_t{kClearThreads}) {
    p.words[i] = 0;
  }
}

void (*clear_kernel())(ClearParams) { return sm90_chunk_fwd_clear; }

}  // namespace kda::cuda::sm90
