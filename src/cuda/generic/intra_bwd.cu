// Gradients through the scores, one block a chunk and value head: (5.19)-(5.25) with the diagonal
// of dP kept out of dg (5.32), (5.33).
//
// A lane is a key channel, 32 at a time; warp w holds rows w, w + 8, ... Every pair i > j is
// evaluated exactly, once for its row and once for its column: 2 x 2016 x 128 exponentials a block
// at C = 64, K = 128, 1.7 ms of the special-function units at 786 k token-heads.
//
// Shared memory, in elements: q, k, Gamma [64][33] each (Gamma's later the terms summed over rows),
// pairs (dP, dL) of the lower triangle [2080][2], beta [64]. 84 KB in fp64.
#include "cuda/generic/chunk_launch.h"
#include "cuda/generic/stages.h"
#include "cuda/tile/chunk_tile.cuh"
#include "cuda/tile/gate.cuh"

namespace kda::cuda {
namespace {

constexpr int kChannels = 32;
constexpr int kStride = kChannels + 1;
constexpr int kWarps = kThreads / 32;
constexpr int kOwn = kTileRows / kWarps;  // rows of a thread
/// fp64 only compiles longer for it.
template <class Real>
constexpr int kUnroll = sizeof(Real) == 4 ? 2 : 1;
constexpr int kTriangle = kTileRows * (kTileRows + 1) / 2;
constexpr int kSharedElements = 3 * kTileRows * kStride + 2 * kTriangle + kTileRows;

__device__ constexpr int triangle(int i, int j) { return i * (i + 1) / 2 + j; }

__device__ int own_row(int r) { return static_cast<int>(threadIdx.x) / 32 + kWarps * r; }
__device__ int lane() { return static_cast<int>(threadIdx.x) % 32; }

template <class Real>
struct IntraShared {
  Real *pairs, *q, *k, *gamma, *beta;

  __device__ explicit IntraShared(Real* base)
      : pairs(base),
        q(pairs + 2 * kTriangle),
        k(q + kTileRows * kStride),
        gamma(k + kTileRows * kStride),
        beta(gamma + kTileRows * kStride) {}

  __device__ void pair(int i, int j, Real& dP, Real& dL) const {
    Real both[2];
    read<2>(both, pairs + 2 * triangle(i, j));
    dP = both[0];
    dL = both[1];
  }
};

/// One channel of a thread's rows.
template <class Real>
using Rows = Real[kOwn];

/// Rows beyond the chunk are 0, or with `repeat_last` like its last one.
template <class Real>
__device__ void load_rows(Rows<Real>& x, const Tensor& t, const Chunk& chunk, int64_t head,
                          int32_t k, int32_t K, bool repeat_last = false) {
  const int64_t base = token_offset(t, chunk.batch, chunk.begin, head) + k * t.stride[3];
  with_element(t.dtype, [&]<class T>(Element<T>) {
    const T* data = static_cast<const T*>(t.data) + base;
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      int i = own_row(r);
      if (repeat_last && i >= chunk.rows) i = chunk.rows - 1;
      x[r] = t.data && k < K && i < chunk.rows ? to_real<Real>(data[i * t.stride[1]]) : Real(0);
    }
  });
}

template <class Real>
__device__ void save_rows(const Rows<Real>& x, const Tensor& t, const Chunk& chunk, int64_t head,
                          int32_t k, int32_t K) {
  if (!t.data) return;
  const int64_t base = token_offset(t, chunk.batch, chunk.begin, head) + k * t.stride[3];
  with_element(t.dtype, [&]<class T>(Element<T>) {
    T* data = static_cast<T*>(t.data) + base;
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      const int i = own_row(r);
      if (k < K && i < chunk.rows) data[i * t.stride[1]] = from_real<T>(x[r]);
    }
  });
}

template <class Real>
__device__ void put_rows(const Rows<Real>& x, Real* shared) {
#pragma unroll
  for (int r = 0; r < kOwn; ++r) shared[own_row(r) * kStride + lane()] = x[r];
}

/// Row roles (5.19), (5.20): sums over j < i of dP k E and dL k E. Row r of a thread lies in block
/// r of 8 rows, so that only the block of j itself needs a comparison.
template <class Real>
__device__ __forceinline__ void add_row_roles(Rows<Real>& dq, Rows<Real>& z,
                                              const Rows<Real>& gamma,
                                              const IntraShared<Real>& shared, int32_t rows) {
#pragma unroll
  for (int block = 0; block < kOwn; ++block) {
    if (block * kWarps >= rows) break;
#pragma unroll kUnroll < Real>
    for (int j = block * kWarps; j < (block + 1) * kWarps; ++j) {
      const Real k = shared.k[j * kStride + lane()];
      const Real gj = shared.gamma[j * kStride + lane()];
#pragma unroll
      for (int r = block; r < kOwn; ++r) {
        const int i = own_row(r);
        if (r == block && i <= j) continue;
        const Real t = k * exp2_of(gamma[r] - gj);
        Real dP, dL;
        shared.pair(i, j, dP, dL);
        dq[r] += dP * t;
        z[r] += dL * t;
      }
    }
  }
}

/// Column role (5.23): sums over i > j of (dP q_i + dL beta_i k_i) E.
template <class Real>
__device__ __forceinline__ void add_column_role(Rows<Real>& dk, const Rows<Real>& gamma,
                                                const IntraShared<Real>& shared, int32_t rows) {
#pragma unroll
  for (int block = 0; block < kOwn; ++block) {
    if (block * kWarps >= rows) break;
#pragma unroll kUnroll < Real>
    for (int i = block * kWarps; i < (block + 1) * kWarps; ++i) {
      const Real q = shared.q[i * kStride + lane()];
      const Real bk = shared.beta[i] * shared.k[i * kStride + lane()];
      const Real gi = shared.gamma[i * kStride + lane()];
#pragma unroll
      for (int r = 0; r <= block; ++r) {
        const int j = own_row(r);
        if (r == block && j >= i) continue;
        Real dP, dL;
        shared.pair(i, j, dP, dL);
        dk[r] += (dP * q + dL * bk) * exp2_of(gi - gamma[r]);
      }
    }
  }
}

/// Replaces each thread's terms by the sum over their row and all later ones, one channel a lane.
template <class Real>
__device__ void suffix_sum(Rows<Real>& x, Real* shared) {
  __syncthreads();
  put_rows(x, shared);
  __syncthreads();
  if (threadIdx.x < 32) {
    Real sum = 0;
#pragma unroll 8
    for (int i = kTileRows - 1; i >= 0; --i) {
      sum += shared[i * kStride + lane()];
      shared[i * kStride + lane()] = sum;
    }
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kOwn; ++r) x[r] = shared[own_row(r) * kStride + lane()];
}

/// 1 / |x| of a thread's rows, 1 where q and k come normalised.
template <class Real>
__device__ void load_factors(Rows<Real>& x, const Tensor& r, const Chunk& chunk, int64_t h) {
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    const int i = own_row(j);
    x[j] = r.data && i < chunk.rows
               ? load<Real>(r, token_offset(r, chunk.batch, chunk.begin + i, h))
               : Real(1);
  }
}

template <class Real>
__device__ void channels(const IntraBackwardParams& p, const IntraShared<Real>& shared,
                         const Chunk& chunk, int64_t hv, int32_t k0, const Rows<Real>& rq,
                         const Rows<Real>& rk, Rows<Real>& dbeta) {
  const int32_t K = p.heads.K;
  const int32_t c = k0 + lane();
  const int64_t h = hv / p.heads.group;
  Rows<Real> q, k, gamma;
  load_rows(q, p.q, chunk, h, c, K);
  load_rows(k, p.k, chunk, h, c, K);
  // The decay of padding rows is 1, so that no factor exceeds 1; their dP and dL are 0.
  load_rows(gamma, p.gamma, chunk, hv, c, K, true);
#pragma unroll
  for (int r = 0; r < kOwn; ++r) q[r] *= rq[r], k[r] *= rk[r];
  __syncthreads();
  put_rows(q, shared.q);
  put_rows(k, shared.k);
  put_rows(gamma, shared.gamma);
  __syncthreads();
  Rows<Real> dq = {};
  Rows<Real> z = {};
  Rows<Real> dk = {};
  add_row_roles(dq, z, gamma, shared, chunk.rows);
  add_column_role(dk, gamma, shared, chunk.rows);
  Rows<Real> partial, dg;
  load_rows(partial, p.dq_partial, chunk, hv, c, K);
#pragma unroll
  for (int r = 0; r < kOwn; ++r) {
    const int i = own_row(r);
    Real diagonal, unused;
    shared.pair(i, i, diagonal, unused);
    const Real through_row = shared.beta[i] * z[r];
    dbeta[r] += z[r] * k[r];
    dg[r] = q[r] * dq[r] + k[r] * (through_row - dk[r]);
    dq[r] += diagonal * k[r] + partial[r];
    dk[r] += diagonal * q[r] + through_row;
  }
  save_rows(dq, p.dq, chunk, hv, c, K);
  load_rows(partial, p.dk_partial, chunk, hv, c, K);
#pragma unroll
  for (int r = 0; r < kOwn; ++r) dk[r] += partial[r];
  save_rows(dk, p.dk, chunk, hv, c, K);
  if (!p.dg.data) return;
  suffix_sum(dg, shared.gamma);
  load_rows(partial, p.dg_partial, chunk, hv, c, K);
#pragma unroll
  for (int r = 0; r < kOwn; ++r) dg[r] += partial[r];
  save_rows(dg, p.dg, chunk, hv, c, K);
}

/// (dP, dL) of the valid lower triangle, 0 elsewhere.
template <class Real>
__device__ void load_pairs(const IntraBackwardParams& p, const IntraShared<Real>& shared,
                           const Chunk& chunk, int64_t hv) {
  const int64_t dP = token_offset(p.dP, chunk.batch, chunk.begin, hv);
  const int64_t dL = token_offset(p.dL, chunk.batch, chunk.begin, hv);
#pragma unroll 4
  for (int e = static_cast<int>(threadIdx.x); e < kTileRows * kTileRows; e += kThreads) {
    const int i = e / kTileRows;
    const int j = e % kTileRows;
    if (j > i) continue;
    const bool valid = i < chunk.rows;
    Real* const pair = shared.pairs + 2 * triangle(i, j);
    pair[0] = valid ? load<Real>(p.dP, dP + i * p.dP.stride[1] + j * p.dP.stride[3]) : Real(0);
    pair[1] =
        valid && j < i ? load<Real>(p.dL, dL + i * p.dL.stride[1] + j * p.dL.stride[3]) : Real(0);
  }
}

template <class Real>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<Real>)
    intra_bwd(const __grid_constant__ IntraBackwardParams p) {
  const IntraShared<Real> shared(shared_memory<Real>());
  const int64_t tiles = p.sequences.chunk_rows * p.heads.HV;
  const int64_t G = p.heads.group;
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const int64_t hv = index % p.heads.HV;
    const Chunk chunk = chunk_of(p.sequences, index / p.heads.HV);
    if (chunk.rows == 0) continue;
    __syncthreads();
    load_pairs(p, shared, chunk, hv);
    load_scalars(shared.beta, p.beta, chunk, hv, Real(0));
    Rows<Real> rq, rk;
    load_factors(rq, p.rq, chunk, hv / G);
    load_factors(rk, p.rk, chunk, hv / G);
    Rows<Real> dbeta = {};
    for (int k0 = 0; k0 < p.heads.K; k0 += kChannels) {
      channels(p, shared, chunk, hv, k0, rq, rk, dbeta);
    }
    if (!p.dbeta.data) continue;
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      const int i = own_row(r);
      Real sum = row_sum(dbeta[r]);
      sum += __shfl_xor_sync(~0u, sum, 16);
      if (lane() == 0 && i < chunk.rows) {
        if (p.dbeta_partial.data) {
          sum += load<Real>(p.dbeta_partial,
                            token_offset(p.dbeta_partial, chunk.batch, chunk.begin + i, hv));
        }
        store<Real>(p.dbeta, token_offset(p.dbeta, chunk.batch, chunk.begin + i, hv), sum);
      }
    }
  }
}

}  // namespace

Status launch_intra_bwd(const IntraBackwardParams& p, bool fp64, cudaStream_t stream) {
  return launch_chunks("intra_bwd", intra_bwd<float>, intra_bwd<double>, kThreads, kSharedElements,
                       p, fp64, stream);
}

}  // namespace kda::cuda
