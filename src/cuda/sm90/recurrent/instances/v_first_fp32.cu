#include "cuda/sm90/recurrent/instances/instances.h"
#include "cuda/sm90/recurrent/recurrent.cuh"

namespace kda::cuda::sm90 {
KDA_SM90_RECURRENT_INSTANCE(v_first_fp32, VFirst, float)
}  // namespace kda::cuda::sm90
