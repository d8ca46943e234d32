#include "cuda/sm90/chunk_fwd/instances/instances.h"
#include "cuda/sm90/chunk_fwd/prep.cuh"
#include "cuda/sm90/chunk_fwd/scan.cuh"

namespace kda::cuda::sm90 {
ChunkForwardKernels chunk_fwd_bf16_k64() {
  return {sm90_chunk_fwd_prep<__nv_bfloat16, 64, false>,
          sm90_chunk_fwd_prep<__nv_bfloat16, 64, true>, sizeof(PrepShared<__nv_bfloat16, 64>),
          sm90_chunk_scan<ForwardConsumer<__nv_bfloat16, 64>>,
          sm90_chunk_scan<ForwardConsumer<__nv_bfloat16, 64, Walk::kSummary>>};
}
}  // namespace kda::cuda::sm90
