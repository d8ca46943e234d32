// Scores and inverse of one chunk and value head a block: (4.4)-(4.7).
//
// Every pair i >= j is evaluated exactly, with 2^(Gamma_i - Gamma_j) <= 1: no re-based factors, so
// any decay is safe and early rows do not depend on later gates. At 64 x 64 / 2 pairs and K = 128
// this is 266 k exponentials a block, 0.9 ms of the special-function units at 786 k token-heads.
//
// Shared memory, in elements: q, k, Gamma panels [32][68] each (later P and A), L [64][65],
// 4 x 64 scalars.
#include "cuda/generic/chunk_launch.h"
#include "cuda/generic/stages.h"
#include "cuda/tile/chunk_tile.cuh"
#include "cuda/tile/gate.cuh"

namespace kda::cuda {
namespace {

constexpr int kDepth = 32;
constexpr int kPanel = kDepth * kPanelStride;
constexpr int kScoreStride = kTileRows + 1;
// 4 parts x 8 columns of the inverse fall into 32 different banks.
constexpr int kInverseStride = 72;
constexpr int kSharedElements = 3 * kPanel + kTileRows * kScoreStride + 4 * kTileRows;

/// The 4 x 4 blocks on and below the diagonal, one a thread.
struct TriangleTile {
  int row, col;
  bool active;
};

__device__ TriangleTile triangle_tile(int32_t C) {
  const int tid = static_cast<int>(threadIdx.x);
  int i = 0;
  while ((i + 1) * (i + 2) / 2 <= tid) ++i;
  return {4 * i, 4 * (tid - i * (i + 1) / 2), i < C / 4};
}

/// P and L of a thread's block without scalars, over one panel of channels.
template <class Real>
__device__ __forceinline__ void add_scores(Real (&P)[4][4], Real (&L)[4][4], const Real* q,
                                           const Real* k, const Real* gamma,
                                           const TriangleTile& tile) {
#pragma unroll 2
  for (int d = 0; d < kDepth; ++d) {
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
        L[m][n] += ki[m] * t;
      }
    }
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

template <class Real>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<Real>)
    intra(const __grid_constant__ IntraParams p) {
  Real* const qs = shared_memory<Real>();
  Real* const ks = qs + kPanel;
  Real* const gs = ks + kPanel;
  Real* const Ls = gs + kPanel;
  Real* const rq = Ls + kTileRows * kScoreStride;
  Real* const rk = rq + kTileRows;
  Real* const beta = rk + kTileRows;
  const int64_t tiles = p.sequences.chunk_rows * p.heads.HV;
  const int64_t G = p.heads.group;
  const TriangleTile tile = triangle_tile(p.sequences.C);
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const int64_t hv = index % p.heads.HV;
    const int64_t h = hv / G;
    const Chunk chunk = chunk_of(p.sequences, index / p.heads.HV);
    if (chunk.rows == 0) continue;
    load_scalars(rq, p.rq, chunk, h, Real(1));
    load_scalars(rk, p.rk, chunk, h, Real(1));
    load_scalars(beta, p.beta, chunk, hv, Real(0));
    Real P[4][4] = {};
    Real L[4][4] = {};
    for (int k0 = 0; k0 < p.heads.K; k0 += kDepth) {
      Panel<Real, kTileRows, kDepth, true> q, k, gamma;
      load_tokens(q, p.q, chunk, h, k0, p.heads.K);
      load_tokens(k, p.k, chunk, h, k0, p.heads.K);
      load_tokens(gamma, p.gamma, chunk, hv, k0, p.heads.K);
      __syncthreads();
      q.put(qs);
      k.put(ks);
      gamma.put(gs);
      __syncthreads();
      if (tile.active) add_scores(P, L, qs, ks, gs, tile);
    }
    __syncthreads();
    Real* const Ps = qs;
    if (tile.active) {
#pragma unroll
      for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int i = tile.row + m;
          const int j = tile.col + n;
          Ps[i * kScoreStride + j] = static_cast<Real>(p.scale) * rq[i] * rk[j] * P[m][n];
          Ls[i * kScoreStride + j] =
              j < i && i < chunk.rows ? beta[i] * rk[i] * rk[j] * L[m][n] : Real(0);
        }
      }
    }
    __syncthreads();
    if (p.Aqk.data) save_triangle(p.Aqk, Ps, kScoreStride, chunk, hv, p.sequences.C);
    if (!p.A.data) continue;
    __syncthreads();
    invert(Ls, qs, chunk.rows);
    __syncthreads();
    save_triangle(p.A, qs, kInverseStride, chunk, hv, p.sequences.C);
  }
}

}  // namespace

Status launch_intra(const IntraParams& p, bool fp64, cudaStream_t stream) {
  return launch_chunks("intra", intra<float>, intra<double>, kThreads, kSharedElements, p, fp64,
                       stream);
}

}  // namespace kda::cuda
