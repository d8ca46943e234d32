#include "cuda/sm90/chunk_bwd/grad.cuh"
#include "cuda/sm90/chunk_bwd/instances/grad_instances.h"

namespace kda::cuda::sm90 {
GradKernel grad_fp16_k64(int32_t gate) {
  constexpr std::size_t kBytes = sizeof(GradShared<__half, 64>);
  constexpr int kBlocks = GradTraits<__half, 64>::kBlocksPerSm;
  switch (gate) {
    case kGateNone:
      return {sm90_chunk_bwd_grad<__half, 64, kGateNone>, kBytes, kBlocks};
    case kGateSoftplus:
      return {sm90_chunk_bwd_grad<__half, 64, kGateSoftplus>, kBytes, kBlocks};
    default:
      return {sm90_chunk_bwd_grad<__half, 64, kGateLowerBound>, kBytes, kBlocks};
  }
}
}  // namespace kda::cuda::sm90
