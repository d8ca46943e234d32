// Gated operands of one chunk and value head a block: (4.9)-(4.12).
//
// Shared memory, in elements: A^T and a right-hand side, [64][68] each, 3 x 64 scalars, Gamma of
// the last row [256].
#include "cuda/generic/chunk_launch.h"
#include "cuda/generic/stages.h"
#include "cuda/tile/chunk_tile.cuh"
#include "cuda/tile/gate.cuh"

namespace kda::cuda {
namespace {

constexpr int kTile = kTileRows * kPanelStride;
constexpr int kMaxK = 256;
constexpr int kSharedElements = 2 * kTile + 3 * kTileRows + kMaxK;

template <class Real>
using ColumnPanel = Panel<Real, kTileRows, kTileRows, false>;

template <class Real>
struct WuShared {
  Real *A, *rhs, *rq, *rk, *beta, *last;

  __device__ explicit WuShared(Real* base)
      : A(base),
        rhs(A + kTile),
        rq(rhs + kTile),
        rk(rq + kTileRows),
        beta(rk + kTileRows),
        last(beta + kTileRows) {}
};

/// A times a right-hand side in registers, saved as columns col0.. of `result`.
template <class Real>
__device__ void solve(const WuShared<Real>& shared, const ColumnPanel<Real>& rhs,
                      const Tensor& result, const Chunk& chunk, int64_t hv, int64_t col0,
                      int64_t cols) {
  __syncthreads();
  rhs.put(shared.rhs);
  __syncthreads();
  Accumulator<Real, 4, 4> acc;
  // Later rows are left out, not multiplied by 0: they may hold NaN.
  acc.add_product_if(shared.A, kPanelStride, shared.rhs, kPanelStride, chunk.rows,
                     [](int i, int j) { return j <= i; });
  save_tokens(acc, result, chunk, hv, col0, cols);
}

template <class Real>
__device__ void key_columns(const WuParams& p, const WuShared<Real>& shared, const Chunk& chunk,
                            int64_t h, int64_t hv, int k0) {
  ColumnPanel<Real> gamma, x, y;
  load_tokens(gamma, p.gamma, chunk, hv, k0, p.heads.K);
  if (p.qg.data) {
    load_tokens(x, p.q, chunk, h, k0, p.heads.K);
    x.combine(gamma, [&](int, int i, Real q, Real G) { return q * shared.rq[i] * exp2_of(G); });
    save_tokens(x, p.qg, chunk, hv, k0, p.heads.K);
  }
  load_tokens(x, p.k, chunk, h, k0, p.heads.K);
  x.map([&](int, int i, Real k) { return k * shared.rk[i]; });
  if (p.kg.data) {
    y = x;
    y.combine(gamma, [&](int c, int, Real k, Real G) {
      return k0 + c < p.heads.K ? k * exp2_of(shared.last[k0 + c] - G) : Real(0);
    });
    save_tokens(y, p.kg, chunk, hv, k0, p.heads.K);
  }
  if (!p.w.data) return;
  x.combine(gamma, [&](int, int i, Real k, Real G) { return shared.beta[i] * (k * exp2_of(G)); });
  solve(shared, x, p.w, chunk, hv, k0, p.heads.K);
}

template <class Real>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<Real>)
    wu(const __grid_constant__ WuParams p) {
  const WuShared<Real> shared(shared_memory<Real>());
  const int64_t tiles = p.sequences.chunk_rows * p.heads.HV;
  const int64_t G = p.heads.group;
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const int64_t hv = index % p.heads.HV;
    const int64_t h = hv / G;
    const Chunk chunk = chunk_of(p.sequences, index / p.heads.HV);
    if (chunk.rows == 0) continue;
    __syncthreads();
    load_scalars(shared.rq, p.rq, chunk, h, Real(1));
    load_scalars(shared.rk, p.rk, chunk, h, Real(1));
    load_scalars(shared.beta, p.beta, chunk, hv, Real(0));
    load_last_gamma(shared.last, p.gamma, chunk, hv, p.heads.K, kMaxK);
    Panel<Real, kTileRows, kTileRows, true> A;
    load_tokens(A, p.A, chunk, hv, 0, p.sequences.C);
    A.put(shared.A);
    __syncthreads();
    for (int k0 = 0; k0 < p.heads.K; k0 += kTileRows) {
      key_columns(p, shared, chunk, h, hv, k0);
    }
    if (!p.u.data) continue;
    for (int64_t v0 = 0; v0 < p.heads.V; v0 += kTileRows) {
      ColumnPanel<Real> v;
      load_tokens(v, p.v, chunk, hv, v0, p.heads.V);
      v.map([&](int, int i, Real x) { return shared.beta[i] * x; });
      solve(shared, v, p.u, chunk, hv, v0, p.heads.V);
    }
  }
}

}  // namespace

Status launch_wu(const WuParams& p, bool fp64, cudaStream_t stream) {
  return launch_chunks("wu", wu<float>, wu<double>, kThreads, kSharedElements, p, fp64, stream);
}

}  // namespace kda::cuda
