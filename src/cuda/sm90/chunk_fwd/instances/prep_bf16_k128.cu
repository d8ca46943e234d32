#include "cuda/sm90/chunk_fwd/prep.cuh"
namespace kda::cuda::sm90 { template __global__ void sm90_chunk_fwd_prep<__nv_bfloat16, 128>(const __grid_constant__ PrepParams); }
