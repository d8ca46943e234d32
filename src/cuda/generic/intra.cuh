// Scores and inverse of a chunk and value head: (4.4)-(4.7).
//
// Every pair i >= j is evaluated exactly, with 2^(Gamma_i - Gamma_j) <= 1: no re-based factors, so
// any decay is safe and early rows do not depend on later gates. At 64 x 64 / 2 pairs and K = 128
// this is 266 k exponentials a block, 0.9 ms of the special-function units at 786 k token-heads.
#pragma once

#include "cuda/generic/stages.h"
#include "cuda/tile/chunk_tile.cuh"
#include "cuda/tile/gate.cuh"

namespace kda::cuda {

inline constexpr int kScoreDepth = 32;  // channels in shared memory at a time
inline constexpr int kScorePanel = kScoreDepth * kPanelStride;
inline constexpr int kScoreStride = kTileRows + 1;
// 4 parts x 8 columns of the inverse fall into 32 different banks.
inline constexpr int kInverseStride = 72;

/// Shared memory of the scores. P and then A lie where the panels of q, k, Gamma were.
template <class Real>
struct ScoreShared {
  static constexpr int kElements = 3 * kScorePanel + kTileRows * kScoreStride;
  static_assert(kTileRows * kInverseStride <= 3 * kScorePanel);

  Real *q, *k, *gamma, *L;

  __device__ explicit ScoreShared(Real* base)
      : q(base), k(q + kScorePanel), gamma(k + kScorePanel), L(gamma + kScorePanel) {}
  __device__ Real* P() const { return q; }
  __device__ Real* A() const { return q; }
};

/// The 4 x 4 blocks on and below the diagonal, one a thread.
struct TriangleTile {
  int row, col;
  bool active;
};

__device__ __forceinline__ TriangleTile triangle_tile(int32_t C) {
  const int tid = static_cast<int>(threadIdx.x);
  int i = 0;
  while ((i + 1) * (i + 2) / 2 <= tid) ++i;
  return {4 * i, 4 * (tid - i * (i + 1) / 2), i < C / 4};
}

/// Adds one panel of channels to P and L of a thread's block without scalars. That of L is summed
/// by itself first: A takes errors of L to A dL A, which grows where keys repeat, and one chain of
/// K products has four times the error of a chain of panels.
template <class Real>
__device__ __forceinline__ void add_scores(Real (&P)[4][4], Real (&L)[4][4], const Real* q,
                                           const Real* k, const Real* gamma,
                                           const TriangleTile& tile) {
  Real panel[4][4] = {};
#pragma unroll 2
  for (int d = 0; d < kScoreDepth; ++d) {
    Real qi[4], ki[4], gi[4], kj[4], gj[4];
    read<4>(qi, q + d * kPanelStride + tile.row);
    read<4>(ki, k + d * kPanelStride + tile.row);
    read<4>(gi, gamma + d * kPanelStride + tile.row);
    read<4>(kj, k + d * kPanelStride + tile.col);
    read<4>(gj, gamma + d * kPanelStride + tile.col);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const Real t = kj[n] * exp2_of(gi[m] - gj[n]);
        P[m][n] += qi[m] * t;
        panel[m][n] += ki[m] * t;
      }
    }
  }
#pragma unroll
  for (int m = 0; m < 4; ++m) {
#pragma unroll
    for (int n = 0; n < 4; ++n) L[m][n] += panel[m][n];
  }
}

/// A = (I + L)^-1 by forward substitution. Four threads a column, which lie in one warp.
template <class Real>
__device__ void invert(const Real* L, Real* A, int32_t rows) {
  const int c = static_cast<int>(threadIdx.x) / 4;
  const int part = static_cast<int>(threadIdx.x) % 4;
  for (int i = 0; i < rows; ++i) {
    Real sum = 0;
    for (int j = part; j < i; j += 4) sum += L[i * kScoreStride + j] * A[j * kInverseStride + c];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (part == 0) A[i * kInverseStride + c] = (i == c ? Real(1) : Real(0)) - sum;
    __syncwarp();
  }
}

/// Lower triangle of a matrix in shared memory, zeros above it.
template <class Real>
__device__ void save_triangle(const Tensor& t, const Real* shared, int stride, const Chunk& chunk,
                              int64_t hv, int32_t C) {
  const int64_t base = token_offset(t, chunk.batch, chunk.begin, hv);
  with_element(t.dtype, [&]<class T>(Element<T>) {
    T* data = static_cast<T*>(t.data) + base;
    for (int e = static_cast<int>(threadIdx.x); e < chunk.rows * C; e += kThreads) {
      const int i = e / C;
      const int j = e - i * C;
      data[i * t.stride[1] + j * t.stride[3]] =
          from_real<T>(j <= i ? shared[i * stride + j] : Real(0));
    }
  });
}

/// P scaled and L in shared memory.
template <class Real>
__device__ void find_scores(const IntraWuParams& p, const ScoreShared<Real>& shared,
                            const RowFactors<Real>& factors, const Chunk& chunk, int64_t h,
                            int64_t hv, const TriangleTile& tile) {
  Real P[4][4] = {};
  Real L[4][4] = {};
  for (int k0 = 0; k0 < p.heads.K; k0 += kScoreDepth) {
    Panel<Real, kTileRows, kScoreDepth, true> q, k, gamma;
    load_tokens(q, p.q, chunk, h, k0, p.heads.K);
    load_tokens(k, p.k, chunk, h, k0, p.heads.K);
    load_tokens(gamma, p.gamma, chunk, hv, k0, p.heads.K);
    __syncthreads();
    q.put(shared.q);
    k.put(shared.k);
    gamma.put(shared.gamma);
    __syncthreads();
    if (tile.active) add_scores(P, L, shared.q, shared.k, shared.gamma, tile);
  }
  __syncthreads();
  if (tile.active) {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int i = tile.row + m;
        const int j = tile.col + n;
        shared.P()[i * kScoreStride + j] =
            static_cast<Real>(p.scale) * factors.rq[i] * factors.rk[j] * P[m][n];
        shared.L[i * kScoreStride + j] =
            j < i && i < chunk.rows ? factors.beta[i] * factors.rk[i] * factors.rk[j] * L[m][n]
                                    : Real(0);
      }
    }
  }
  __syncthreads();
}

}  // namespace kda::cuda
