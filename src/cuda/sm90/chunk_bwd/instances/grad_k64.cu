#include "cuda/sm90/chunk_bwd/grad.cuh"
#include "cuda/sm90/chunk_bwd/instances/grad_instances.h"

namespace kda::cuda::sm90 {
GradKernel grad_bf16_k64() {
  return {sm90_chunk_bwd_grad<64>, sizeof(GradShared<64>), GradTraits<64>::kBlocksPerSm};
}
}  // namespace kda::cuda::sm90
