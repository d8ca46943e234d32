#include "cuda/recurrent/instances/instances.h"
#include "cuda/recurrent/recurrent.cuh"

namespace kda::cuda {
KDA_RECURRENT_INSTANCES(v_first_bf16, VFirstState, __nv_bfloat16)
}  // namespace kda::cuda
