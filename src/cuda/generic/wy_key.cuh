// The key half of the WY backward of a chunk and value head: gradients through the states, (5.7),
// (5.8), (5.13), (5.29), and what (5.33) sums over rows.
#pragma once

#include "cuda/generic/wy_value.cuh"
#include "cuda/tile/gate.cuh"

namespace kda::cuda {

inline constexpr int kKeyDepth = kValueColumns;
inline constexpr int kSumStride = kTileRows + 1;
inline constexpr int kParts = kThreads / kTileRows;

template <class Real>
using RowPanel = Panel<Real, kTileRows, kKeyDepth, true>;
template <class Real>
using Tile = Accumulator<Real, 4, 4>;

/// Five operand panels [32][68], later two tiles [64][65] whose columns are summed; rowsum_V(h .
/// dh) in four parts [4][64]; Gamma of the last row [256].
template <class Real>
struct WyKeyShared {
  static constexpr int kElements = 5 * kWyPanel + kParts * kTileRows + kMaxChannels;
  static_assert(2 * kTileRows * kSumStride <= 5 * kWyPanel);

  Real *panels, *h_dh, *last;
  RowFactors<Real> factors;

  __device__ WyKeyShared(Real* base, const RowFactors<Real>& factors_of_rows)
      : panels(base),
        h_dh(panels + 5 * kWyPanel),
        last(h_dh + kParts * kTileRows),
        factors(factors_of_rows) {}
};

/// -Y = R h^T, do h^T, v_new dh^T for channels k0.., and a thread's part of rowsum_V(h . dh).
template <class Real>
struct StateProducts {
  Tile<Real> R_h, do_h, v_dh;
  Real h_dh = 0;

  __device__ void add(const WyBackwardParams& p, const WyKeyShared<Real>& shared,
                      const Chunk& chunk, int64_t row, int64_t hv, int32_t k0, int64_t v0) {
    const int64_t V = p.heads.V;
    Real* const at = shared.panels;
    {
      RowPanel<Real> R, grad_o, v_new;
      load_tokens(R, p.R, chunk, hv, v0, V);
      load_tokens(grad_o, p.grad_o, chunk, hv, v0, V);
      load_tokens(v_new, p.v_new, chunk, hv, v0, V);
      __syncthreads();
      R.put(at);
      grad_o.put(at + kWyPanel);
      v_new.put(at + 2 * kWyPanel);
    }
    RowPanel<Real> h, dh;  // loaded after the others left their registers
    load_checkpoint(h, p.h, row, hv, k0, p.heads.K, v0, V);
    load_checkpoint(dh, p.dh, row, hv, k0, p.heads.K, v0, V);
    h.put(at + 3 * kWyPanel);
    dh.put(at + 4 * kWyPanel);
    __syncthreads();
    R_h.add_product(at, kPanelStride, at + 3 * kWyPanel, kPanelStride, kKeyDepth);
    do_h.add_product(at + kWyPanel, kPanelStride, at + 3 * kWyPanel, kPanelStride, kKeyDepth);
    v_dh.add_product(at + 2 * kWyPanel, kPanelStride, at + 4 * kWyPanel, kPanelStride, kKeyDepth);
    const int k = static_cast<int>(threadIdx.x) % kTileRows;
    const int part = static_cast<int>(threadIdx.x) / kTileRows;
    for (int v = part; v < kKeyDepth; v += kParts) {
      h_dh += at[3 * kWyPanel + v * kPanelStride + k] * at[4 * kWyPanel + v * kPanelStride + k];
    }
  }
};

/// Turns two tiles in shared memory into suffix sums (inclusive) and prefix sums (exclusive) over
/// rows, one column a thread.
template <class Real>
__device__ void sum_over_rows(Real* suffix, Real* prefix) {
  const int column = static_cast<int>(threadIdx.x) % kTileRows;
  Real sum = 0;
  if (threadIdx.x < kTileRows) {
    for (int i = kTileRows - 1; i >= 0; --i) {
      sum += suffix[i * kSumStride + column];
      suffix[i * kSumStride + column] = sum;
    }
  } else if (threadIdx.x < 2 * kTileRows) {
    for (int i = 0; i < kTileRows; ++i) {
      const Real own = prefix[i * kSumStride + column];
      prefix[i * kSumStride + column] = sum;
      sum += own;
    }
  }
}

/// Gates, partial gradients and the sums of (5.33) for channels k0...
template <class Real>
__device__ void finish_columns(const WyBackwardParams& p, const WyKeyShared<Real>& shared,
                               const Chunk& chunk, int64_t hv, int32_t k0,
                               StateProducts<Real>& products, Real (&dbeta)[4]) {
  const int64_t h = hv / p.heads.group;
  Tile<Real> gamma, x;
  fetch_tokens(gamma, p.gamma, chunk, hv, k0, p.heads.K);
  fetch_tokens(x, p.k, chunk, h, k0, p.heads.K);
  Tile<Real> row_term, prefix_term;
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    const int i = gamma.row(m);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const Real e = exp2_of(gamma.x[m][n]);
      const Real k = shared.factors.rk[i] * x.x[m][n];
      const Real eY = -e * products.R_h.x[m][n];
      dbeta[m] += k * eY;
      const Real through_w = shared.factors.beta[i] * eY;
      // Rows beyond the chunk have Gamma = 0 here; their products are 0 and 2^last <= 1.
      const Real through_kg =
          exp2_of(shared.last[k0 + gamma.col(n)] - gamma.x[m][n]) * products.v_dh.x[m][n];
      row_term.x[m][n] = k * through_w;
      prefix_term.x[m][n] = k * through_kg;
      products.v_dh.x[m][n] = through_kg + through_w;
      products.do_h.x[m][n] *= static_cast<Real>(p.scale) * e;
    }
  }
  save_tokens(products.do_h, p.dq, chunk, hv, k0, p.heads.K);
  save_tokens(products.v_dh, p.dk, chunk, hv, k0, p.heads.K);
  if (!p.dg.data) return;
  fetch_tokens(x, p.q, chunk, h, k0, p.heads.K);
  row_term.map([&](int i, int c, Real value) {
    return value + shared.factors.rq[i] * x.at(i, c) * products.do_h.at(i, c);
  });
  Real* const suffix = shared.panels;
  Real* const prefix = suffix + kTileRows * kSumStride;
  __syncthreads();
  row_term.put_rows(suffix, kSumStride);
  prefix_term.put_rows(prefix, kSumStride);
  shared.h_dh[threadIdx.x] = products.h_dh;
  __syncthreads();
  sum_over_rows(suffix, prefix);
  __syncthreads();
  row_term.map([&](int i, int c, Real) {
    Real state_term = 0;
    for (int part = 0; part < kParts; ++part) state_term += shared.h_dh[part * kTileRows + c];
    return suffix[i * kSumStride + c] + prefix[i * kSumStride + c] +
           exp2_of(shared.last[k0 + c]) * state_term;
  });
  save_tokens(row_term, p.dg, chunk, hv, k0, p.heads.K);
}

/// `dbeta` receives the thread's part of rowsum_K(Y . ke).
template <class Real>
__device__ void key_half(const WyBackwardParams& p, const WyKeyShared<Real>& shared,
                         const Chunk& chunk, int64_t row, int64_t hv, Real (&dbeta)[4]) {
  for (int k0 = 0; k0 < p.heads.K; k0 += kTileRows) {
    StateProducts<Real> products;
    for (int64_t v0 = 0; v0 < p.heads.V; v0 += kKeyDepth) {
      products.add(p, shared, chunk, row, hv, k0, v0);
    }
    finish_columns(p, shared, chunk, hv, k0, products, dbeta);
  }
}

}  // namespace kda::cuda
