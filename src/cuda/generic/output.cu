// o from states and scores: (4.17), and do h^T: (5.1). One block a chunk and value head.
//
// Shared memory, in elements: two operand panels [32][68], 64 scalars.
#include "cuda/generic/chunk_launch.h"
#include "cuda/generic/stages.h"
#include "cuda/tile/chunk_tile.cuh"
#include "cuda/tile/gate.cuh"

namespace kda::cuda {
namespace {

constexpr int kDepth = 32;
constexpr int kPanel = kDepth * kPanelStride;
constexpr int kSharedElements = 2 * kPanel + kTileRows;

template <class Real>
using RowPanel = Panel<Real, kTileRows, kDepth, true>;
template <class Real>
using ColumnPanel = Panel<Real, kTileRows, kDepth, false>;
template <class Real>
using Tile = Accumulator<Real, 4, 4>;

template <class Real, class A, class B>
__device__ __forceinline__ void put_panels(const A& a, const B& b, Real* shared) {
  __syncthreads();
  a.put(shared);
  b.put(shared + kPanel);
  __syncthreads();
}

template <class Real, class A, class B>
__device__ void add_panels(Tile<Real>& acc, const A& a, const B& b, Real* shared) {
  put_panels(a, b, shared);
  acc.add_product(shared, kPanelStride, shared + kPanel, kPanelStride, kDepth);
}

template <class Real>
__device__ void output_tile(const OutputParams& p, const Chunk& chunk, int64_t row, int64_t hv,
                            int64_t v0, const Real* rq, Real* shared) {
  const int32_t K = p.heads.K;
  const int64_t h = hv / p.heads.group;
  Tile<Real> acc;
  for (int k0 = 0; k0 < K; k0 += kDepth) {
    RowPanel<Real> q, gamma;
    ColumnPanel<Real> state;
    load_tokens(q, p.q, chunk, h, k0, K);
    load_tokens(gamma, p.gamma, chunk, hv, k0, K);
    load_checkpoint(state, p.h, row, hv, k0, K, v0, p.heads.V);
    q.combine(gamma, [](int, int, Real x, Real G) { return x * exp2_of(G); });
    add_panels(acc, q, state, shared);
  }
  acc.map([&](int i, int, Real x) { return static_cast<Real>(p.scale) * rq[i] * x; });
  for (int j0 = 0; j0 < chunk.rows; j0 += kDepth) {
    RowPanel<Real> scores;
    ColumnPanel<Real> v_new;
    load_tokens(scores, p.Aqk, chunk, hv, j0, p.sequences.C);
    load_tokens(v_new, p.v_new, chunk, hv, v0, p.heads.V, j0);
    put_panels(scores, v_new, shared);
    // Later rows are left out, not multiplied by 0: they may hold NaN.
    acc.add_product_if(shared, kPanelStride, shared + kPanel, kPanelStride, kDepth,
                       [&](int i, int j) { return j0 + j <= i; });
  }
  save_tokens(acc, p.o, chunk, hv, v0, p.heads.V);
}

template <class Real>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<Real>)
    output(const __grid_constant__ OutputParams p) {
  Real* const shared = shared_memory<Real>();
  Real* const rq = shared + 2 * kPanel;
  const int64_t tiles = p.sequences.chunk_rows * p.heads.HV;
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const int64_t hv = index % p.heads.HV;
    const int64_t row = index / p.heads.HV;
    const Chunk chunk = chunk_of(p.sequences, row);
    if (chunk.rows == 0) continue;
    __syncthreads();
    load_scalars(rq, p.rq, chunk, hv / p.heads.group, Real(1));
    __syncthreads();
    for (int64_t v0 = 0; v0 < p.heads.V; v0 += kTileRows) {
      output_tile(p, chunk, row, hv, v0, rq, shared);
    }
  }
}

template <class Real>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<Real>)
    dq_raw(const __grid_constant__ DqRawParams p) {
  Real* const shared = shared_memory<Real>();
  const int64_t tiles = p.sequences.chunk_rows * p.heads.HV;
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const int64_t hv = index % p.heads.HV;
    const int64_t row = index / p.heads.HV;
    const Chunk chunk = chunk_of(p.sequences, row);
    if (chunk.rows == 0) continue;
    for (int k0 = 0; k0 < p.heads.K; k0 += kTileRows) {
      Tile<Real> acc;
      for (int64_t v0 = 0; v0 < p.heads.V; v0 += kDepth) {
        RowPanel<Real> grad_o, state;
        load_tokens(grad_o, p.grad_o, chunk, hv, v0, p.heads.V);
        load_checkpoint(state, p.h, row, hv, k0, p.heads.K, v0, p.heads.V);
        add_panels(acc, grad_o, state, shared);
      }
      save_tokens(acc, p.dq_raw, chunk, hv, k0, p.heads.K);
    }
  }
}

}  // namespace

Status launch_output(const OutputParams& p, bool fp64, cudaStream_t stream) {
  return launch_chunks("output", output<float>, output<double>, kThreads, kSharedElements, p, fp64,
                       stream);
}

Status launch_dq_raw(const DqRawParams& p, bool fp64, cudaStream_t stream) {
  return launch_chunks("dq_raw", dq_raw<float>, dq_raw<double>, kThreads, kSharedElements, p, fp64,
                       stream);
}

}  // namespace kda::cuda
