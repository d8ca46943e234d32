#include "cuda/recurrent/instances/instances.h"
#include "cuda/recurrent/recurrent.cuh"

namespace kda::cuda {
KDA_RECURRENT_INSTANCES(k_first_bf16, KFirstState, __nv_bfloat16)
}  // namespace kda::cuda
