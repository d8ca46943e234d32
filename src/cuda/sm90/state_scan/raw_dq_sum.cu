// dq_raw from the parts that the blocks of sm90_state_scan leave: one addition after the other, in
// the order of the columns of V. One thread four channels of a token and value head; no shared
// memory.
#include "cuda/launch.h"
#include "cuda/sm90/state_scan/state_scan.h"
#include "cuda/tile/sequence.cuh"

namespace kda::cuda::sm90 {
namespace {

constexpr int kSumThreads = 256;
constexpr int kWidth = 4;  // channels of a 16-byte access

__device__ __forceinline__ float4* quad(const Tensor& t, int64_t offset) {
  return reinterpret_cast<float4*>(static_cast<float*>(t.data) + offset);
}

__global__ void __launch_bounds__(kSumThreads)
    sm90_raw_dq_sum(const __grid_constant__ RawDqSumParams p) {
  const int64_t width = p.heads.K / kWidth;
  const int64_t T = p.sequences.T;
  const int64_t B = p.sequences.cu.data ? 1 : p.sequences.count;
  const int64_t used = used_tokens(p.sequences);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kSumThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x;
       i < B * T * p.heads.HV * width; i += step) {
    const int64_t row = i / width;
    const int64_t k = i % width * kWidth;
    const int64_t hv = row % p.heads.HV;
    const int64_t token = row / p.heads.HV % T;
    const int64_t batch = row / p.heads.HV / T;
    if (token >= used) continue;  // no sequence's, and nothing was written
    const int64_t from = token_offset(p.part, batch, token, hv) + k;
    float4 sum = *quad(p.part, from);
    for (int64_t part = 1; part < p.parts; ++part) {
      const float4 next = *quad(p.part, from + part * p.step);
      sum.x += next.x;
      sum.y += next.y;
      sum.z += next.z;
      sum.w += next.w;
    }
    *quad(p.dq_raw, token_offset(p.dq_raw, batch, token, hv) + k) = sum;
  }
}

}  // namespace

Status launch_raw_dq_sum(const RawDqSumParams& p, bool, cudaStream_t stream) {
  const int64_t B = p.sequences.cu.data ? 1 : p.sequences.count;
  const int64_t quads = B * p.sequences.T * p.heads.HV * (p.heads.K / kWidth);
  return launch({"sm90_raw_dq_sum", (quads + kSumThreads - 1) / kSumThreads, kSumThreads},
                sm90_raw_dq_sum, p, stream);
}

}  // namespace kda::cuda::sm90
