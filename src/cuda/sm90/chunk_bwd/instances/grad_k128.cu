#include "cuda/sm90/chunk_bwd/grad.cuh"
#include "cuda/sm90/chunk_bwd/instances/grad_instances.h"

namespace kda::cuda::sm90 {
GradKernel grad_bf16_k128() {
  return {sm90_chunk_bwd_grad<128>, sizeof(GradShared<128>), GradTraits<128>::kBlocksPerSm};
}
}  // namespace kda::cuda::sm90
