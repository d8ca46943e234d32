// The value half of the WY backward of a chunk and value head: R = A^T dv_new (5.10), dv (5.11),
// rowsum_V(R . v) (5.12), dP (5.2) and dL (5.28).
#pragma once

#include "cuda/generic/stages.h"
#include "cuda/tile/chunk_tile.cuh"

namespace kda::cuda {

inline constexpr int kValueColumns = 32;  // of V in shared memory at a time
inline constexpr int kWyPanel = kValueColumns * kPanelStride;
inline constexpr int kValueStride = kValueColumns + 4;
inline constexpr int kValue = kTileRows * kValueStride;

/// A [64][68]; dv_new [64][36], later v_new^T [32][68]; R^T and do^T [32][68] each.
template <class Real>
struct WyValueShared {
  static constexpr int kElements = kTileRows * kPanelStride + kValue + 2 * kWyPanel;

  Real *A, *value, *R, *grad_o;
  const Real* beta;

  __device__ WyValueShared(Real* base, const Real* beta_of_rows)
      : A(base),
        value(A + kTileRows * kPanelStride),
        R(value + kValue),
        grad_o(R + kWyPanel),
        beta(beta_of_rows) {}
};

/// R, dv and the row sums of R . v for columns v0.., R^T into shared memory.
template <class Real>
__device__ void solve_columns(const WyBackwardParams& p, const WyValueShared<Real>& shared,
                              const Chunk& chunk, int64_t hv, int64_t v0, Real (&dbeta)[4]) {
  Panel<Real, kValueColumns, kTileRows, false> dv_new;
  Panel<Real, kTileRows, kValueColumns, true> grad_o, v_new;
  const int cols = rest_of(p.heads.V, v0);
  dv_new.load(p.dv_new,
              token_offset(p.dv_new, chunk.batch, chunk.begin, hv) + v0 * p.dv_new.stride[3],
              p.dv_new.stride[3], p.dv_new.stride[1], cols, chunk.rows);
  load_tokens(grad_o, p.grad_o, chunk, hv, v0, p.heads.V);
  load_tokens(v_new, p.v_new, chunk, hv, v0, p.heads.V);
  __syncthreads();
  dv_new.put(shared.value, kValueStride);
  __syncthreads();
  Accumulator<Real, 4, 2> R;
  R.add_product_if(shared.A, kPanelStride, shared.value, kValueStride, chunk.rows,
                   [](int j, int i) { return j <= i; });
  __syncthreads();
  v_new.put(shared.value);
  grad_o.put(shared.grad_o);
  R.put_cols(shared.R, kPanelStride);
  save_tokens(R, p.R, chunk, hv, v0, p.heads.V);
  Accumulator<Real, 4, 2> v;
  if (p.dbeta.data) fetch_tokens(v, p.v, chunk, hv, v0, p.heads.V);
#pragma unroll
  for (int m = 0; m < 4; ++m) {
#pragma unroll
    for (int n = 0; n < 2; ++n) dbeta[m] += R.x[m][n] * v.x[m][n];
  }
  R.map([&](int j, int, Real x) { return shared.beta[j] * x; });
  save_tokens(R, p.dv, chunk, hv, v0, p.heads.V);
  __syncthreads();
}

/// `dbeta` receives the thread's part of rowsum_V(R . v).
template <class Real>
__device__ void value_half(const WyBackwardParams& p, const WyValueShared<Real>& shared,
                           const Chunk& chunk, int64_t hv, Real (&dbeta)[4]) {
  Panel<Real, kTileRows, kTileRows, false> A;
  load_tokens(A, p.A, chunk, hv, 0, p.sequences.C);
  __syncthreads();
  A.put(shared.A);
  Accumulator<Real, 4, 4> dP, dL;
  for (int64_t v0 = 0; v0 < p.heads.V; v0 += kValueColumns) {
    solve_columns(p, shared, chunk, hv, v0, dbeta);
    dP.add_product(shared.grad_o, kPanelStride, shared.value, kPanelStride, kValueColumns);
    dL.add_product(shared.R, kPanelStride, shared.value, kPanelStride, kValueColumns);
  }
  dP.map([&](int i, int j, Real x) { return j <= i ? static_cast<Real>(p.scale) * x : Real(0); });
  dL.map([](int i, int j, Real x) { return j < i ? -x : Real(0); });
  save_tokens(dP, p.dP, chunk, hv, 0, p.sequences.C);
  save_tokens(dL, p.dL, chunk, hv, 0, p.sequences.C);
}

}  // namespace kda::cuda
