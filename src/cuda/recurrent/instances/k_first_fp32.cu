#include "cuda/recurrent/instances/instances.h"
#include "cuda/recurrent/recurrent.cuh"

namespace kda::cuda {
KDA_RECURRENT_INSTANCES(k_first_fp32, KFirstState, float)
}  // namespace kda::cuda
