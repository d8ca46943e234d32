#include "cuda/sm90/recurrent/instances/instances.h"
#include "cuda/sm90/recurrent/recurrent.cuh"

namespace kda::cuda::sm90 {
KDA_SM90_RECURRENT_INSTANCE(k_first_fp32, KFirst, float)
}  // namespace kda::cuda::sm90
