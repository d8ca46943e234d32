// Section 3 ahead of the chunks, one block a chunk and value head: the gate with its sum inside the
// chunk, one thread a key channel; beta, one thread a row; and, by the first value head of a group,
// the norms of q and k, one warp a row.
#include "cuda/generic/chunk_launch.h"
#include "cuda/generic/stages.h"
#include "cuda/tile/gate.cuh"
#include "cuda/tile/gate_rows.cuh"
#include "cuda/tile/lanes.cuh"
#include "cuda/tile/sequence.cuh"

namespace kda::cuda {
namespace {

/// (4.1), (4.2) of one channel.
template <class Real>
__device__ void cumulate_gate(const ActivateParams& p, const Chunk& chunk, int64_t hv, int k) {
  const Gate<Real> gate = gate_of<Real>(p.gate, hv, k);
  const Tensor& g = p.gate.g;
  const int64_t from = token_offset(g, chunk.batch, chunk.begin, hv) + k * g.stride[3];
  const int64_t to = token_offset(p.gamma, chunk.batch, chunk.begin, hv) + k * p.gamma.stride[3];
  // In fp64, factor included: 64 roundings of a sum near -40 x 64 would show in dA_log, and the one
  // of the result does not.
  double sum = 0;
  for (int base = 0; base < chunk.rows; base += kGateBatch) {
    Real raw[kGateBatch];
    load_batch(raw, g, from, base, chunk.rows);
#pragma unroll
    for (int j = 0; j < kGateBatch; ++j) {
      if (base + j >= chunk.rows) break;
      sum += clamp_gate(gate_value(p.gate, gate, raw[j]));
      store<Real>(p.gamma, to + (base + j) * p.gamma.stride[1], static_cast<Real>(sum * kInvLn2));
    }
  }
}

/// (3.12).
template <class Real>
__device__ void activate_beta(const ActivateParams& p, const Chunk& chunk, int64_t hv) {
  for (int i = static_cast<int>(threadIdx.x); i < chunk.rows; i += static_cast<int>(blockDim.x)) {
    const int64_t token = chunk.begin + i;
    const Real x = load<Real>(p.logit, token_offset(p.logit, chunk.batch, token, hv));
    store<Real>(p.beta, token_offset(p.beta, chunk.batch, token, hv),
                static_cast<Real>(p.beta_factor) * sigmoid(x));
  }
}

/// (3.1) of one row of q or k.
template <class Real>
__device__ void find_norm(const Tensor& x, const Tensor& r, const Chunk& chunk, int64_t token,
                          int64_t h, int32_t K) {
  Lanes<Real> value;
  load_lanes(value, x, token_offset(x, chunk.batch, token, h), K);
  Real sum = 0;
#pragma unroll
  for (const Real v : value) sum += v * v;
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) {
    store<Real>(r, token_offset(r, chunk.batch, token, h),
                1 / sqrt(sum + static_cast<Real>(kNormEps)));
  }
}

template <class Real>
__global__ void __launch_bounds__(kGateThreads) activate(const __grid_constant__ ActivateParams p) {
  const int64_t tiles = p.sequences.chunk_rows * p.heads.HV;
  const int tid = static_cast<int>(threadIdx.x);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t hv = tile % p.heads.HV;
    const Chunk chunk = chunk_of(p.sequences, tile / p.heads.HV);
    if (chunk.rows == 0) continue;
    if (p.gamma.data && tid < p.heads.K) cumulate_gate<Real>(p, chunk, hv, tid);
    if (p.logit.data) activate_beta<Real>(p, chunk, hv);
    if (!p.rq.data || hv % p.heads.group != 0) continue;
    const int64_t h = hv / p.heads.group;
    for (int i = tid / 32; i < chunk.rows; i += static_cast<int>(blockDim.x) / 32) {
      find_norm<Real>(p.q, p.rq, chunk, chunk.begin + i, h, p.heads.K);
      find_norm<Real>(p.k, p.rk, chunk, chunk.begin + i, h, p.heads.K);
    }
  }
}

}  // namespace

Status launch_activate(const ActivateParams& p, bool fp64, cudaStream_t stream) {
  return launch_chunks("activate", activate<float>, activate<double>, channel_threads(p.heads.K), 0,
                       p, fp64, stream);
}

}  // namespace kda::cuda
