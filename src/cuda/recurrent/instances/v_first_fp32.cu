#include "cuda/recurrent/instances/instances.h"
#include "cuda/recurrent/recurrent.cuh"

namespace kda::cuda {
KDA_RECURRENT_INSTANCES(v_first_fp32, VFirstState, float)
}  // namespace kda::cuda
