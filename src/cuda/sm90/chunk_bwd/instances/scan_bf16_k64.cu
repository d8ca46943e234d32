#include "cuda/sm90/chunk_bwd/instances/scan_instances.h"
#include "cuda/sm90/chunk_bwd/rev_scan.cuh"

namespace kda::cuda::sm90 {
BackwardScans backward_scans_bf16_k64() {
  return {sm90_chunk_scan<ForwardConsumer<__nv_bfloat16, 64, Walk::kRescan>>,
          sm90_chunk_scan<ReverseConsumer<__nv_bfloat16, 64>>};
}
}  // namespace kda::cuda::sm90
