// Gated operands of a chunk and value head: (4.9)-(4.12).
#pragma once

#include "cuda/generic/intra.cuh"

namespace kda::cuda {

inline constexpr int kSolveTile = kTileRows * kPanelStride;

template <class Real>
using ColumnPanel = Panel<Real, kTileRows, kTileRows, false>;

/// Shared memory of the operands: a right-hand side and A^T, [64][68] each, and Gamma of the last
/// row.
template <class Real>
struct WuShared {
  Real *rhs, *A, *last;
  RowFactors<Real> factors;
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
__device__ void key_columns(const IntraWuParams& p, const WuShared<Real>& shared,
                            const Chunk& chunk, int64_t h, int64_t hv, int k0) {
  ColumnPanel<Real> gamma, x, y;
  load_tokens(gamma, p.gamma, chunk, hv, k0, p.heads.K);
  if (p.qg.data) {
    load_tokens(x, p.q, chunk, h, k0, p.heads.K);
    x.combine(gamma,
              [&](int, int i, Real q, Real G) { return q * shared.factors.rq[i] * exp2_of(G); });
    save_tokens(x, p.qg, chunk, hv, k0, p.heads.K);
  }
  load_tokens(x, p.k, chunk, h, k0, p.heads.K);
  x.map([&](int, int i, Real k) { return k * shared.factors.rk[i]; });
  if (p.kg.data) {
    y = x;
    y.combine(gamma, [&](int c, int, Real k, Real G) {
      return k0 + c < p.heads.K ? k * exp2_of(shared.last[k0 + c] - G) : Real(0);
    });
    save_tokens(y, p.kg, chunk, hv, k0, p.heads.K);
  }
  if (!p.w.data) return;
  x.combine(gamma,
            [&](int, int i, Real k, Real G) { return shared.factors.beta[i] * (k * exp2_of(G)); });
  solve(shared, x, p.w, chunk, hv, k0, p.heads.K);
}

/// A^T from where the scores left A; 0 above A's diagonal and from the chunk's end on.
template <class Real>
__device__ void transpose_inverse(const Real* A, Real* transposed, int32_t rows) {
  for (int e = static_cast<int>(threadIdx.x); e < kTileRows * kTileRows; e += kThreads) {
    const int i = e % kTileRows;
    const int j = e / kTileRows;
    transposed[j * kPanelStride + i] = j <= i && i < rows ? A[i * kInverseStride + j] : Real(0);
  }
}

/// w, kg, qg and u.
template <class Real>
__device__ void find_operands(const IntraWuParams& p, const WuShared<Real>& shared,
                              const Chunk& chunk, int64_t h, int64_t hv) {
  for (int k0 = 0; k0 < p.heads.K; k0 += kTileRows) key_columns(p, shared, chunk, h, hv, k0);
  if (!p.u.data) return;
  for (int64_t v0 = 0; v0 < p.heads.V; v0 += kTileRows) {
    ColumnPanel<Real> v;
    load_tokens(v, p.v, chunk, hv, v0, p.heads.V);
    v.map([&](int, int i, Real x) { return shared.factors.beta[i] * x; });
    solve(shared, v, p.u, chunk, hv, v0, p.heads.V);
  }
}

}  // namespace kda::cuda
