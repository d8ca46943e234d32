#include "cuda/sm90/state_scan/instances/instances.h"
#include "cuda/sm90/state_scan/state_scan.cuh"

namespace kda::cuda::sm90 {
KDA_STATE_SCAN_INSTANCES(bf16_k128, __nv_bfloat16, 128)
}  // namespace kda::cuda::sm90
