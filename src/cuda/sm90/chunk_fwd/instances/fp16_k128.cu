#include "cuda/sm90/chunk_fwd/instances/instances.h"
#include "cuda/sm90/chunk_fwd/prep.cuh"
#include "cuda/sm90/chunk_fwd/scan.cuh"

namespace kda::cuda::sm90 {
ChunkForwardKernels chunk_fwd_fp16_k128() {
  return {sm90_chunk_fwd_prep<__half, 128, false>, sm90_chunk_fwd_prep<__half, 128, true>,
          sizeof(PrepShared<__half, 128>), sm90_chunk_scan<ForwardConsumer<__half, 128>>,
          sm90_chunk_scan<ForwardConsumer<__half, 128, Walk::kSummary>>};
}
}  // namespace kda::cuda::sm90
