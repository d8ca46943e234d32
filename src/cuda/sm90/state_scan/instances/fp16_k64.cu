#include "cuda/sm90/state_scan/instances/instances.h"
#include "cuda/sm90/state_scan/state_scan.cuh"

namespace kda::cuda::sm90 {
KDA_STATE_SCAN_INSTANCES(fp16_k64, __half, 64)
}  // namespace kda::cuda::sm90
