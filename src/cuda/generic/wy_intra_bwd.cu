// The backward of a chunk beside the scans, one block a chunk and value head: the value half of the
// WY backward, which leaves R in memory, its key half, which reads it and leaves partial gradients,
// and the gradients through the scores, which are added to them. The stages wy_bwd and intra_bwd
// take a part each; the whole operation all in one launch.
//
// Shared memory, in elements: that of the largest part, 3 x 64 factors of rows. 93 KB in fp64.
#include "cuda/generic/chunk_launch.h"
#include "cuda/generic/intra_bwd.cuh"
#include "cuda/generic/wy_key.cuh"

namespace kda::cuda {
namespace {

constexpr int kFactors = WyKeyShared<float>::kElements;
constexpr int kSharedElements = kFactors + 3 * kTileRows;
static_assert(WyValueShared<float>::kElements <= kFactors);
static_assert(IntraShared<float>::kElements <= kFactors);

/// rowsum_V and rowsum_K, each summed over its threads, one added to the other.
template <class Real>
__device__ void save_dbeta(const Tensor& t, const Real (&value)[4], const Real (&key)[4],
                           const Chunk& chunk, int64_t hv) {
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    const Real sum = row_sum(value[m]) + row_sum(key[m]);
    const int i = Tile<Real>::row(m);
    if (threadIdx.x % 16 == 0 && i < chunk.rows) {
      store<Real>(t, token_offset(t, chunk.batch, chunk.begin + i, hv), sum);
    }
  }
}

template <class Real>
__device__ void wy_halves(const WyIntraBackwardParams& p, Real* base,
                          const RowFactors<Real>& factors, const Chunk& chunk, int64_t row,
                          int64_t hv) {
  const WyKeyShared<Real> key(base, factors);
  Real through_value[4] = {};
  Real through_key[4] = {};
  value_half(p, WyValueShared<Real>(base, factors.beta), chunk, hv, through_value);
  __syncthreads();  // R is in memory, and nobody reads the operands
  load_last_gamma(key.last, p.gamma, chunk, hv, p.heads.K, kMaxChannels);
  key_half(p, key, chunk, row, hv, through_key);
  if (p.dbeta_partial.data) save_dbeta(p.dbeta_partial, through_value, through_key, chunk, hv);
}

template <class Real>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<Real>)
    wy_intra_bwd(const __grid_constant__ WyIntraBackwardParams p) {
  Real* const base = shared_memory<Real>();
  const RowFactors<Real> factors(base + kFactors);
  const int64_t tiles = p.sequences.chunk_rows * p.heads.HV;
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const int64_t hv = index % p.heads.HV;
    const int64_t h = hv / p.heads.group;
    const int64_t row = index / p.heads.HV;
    const Chunk chunk = chunk_of(p.sequences, row);
    if (chunk.rows == 0) continue;
    __syncthreads();
    load_scalars(factors.rq, p.rq, chunk, h, Real(1));
    load_scalars(factors.rk, p.rk, chunk, h, Real(1));
    load_scalars(factors.beta, p.beta, chunk, hv, Real(0));
    if (p.wy) wy_halves(p, base, factors, chunk, row, hv);
    if (!p.intra) continue;
    __syncthreads();  // the partial gradients are in memory
    scores_half(p, IntraShared<Real>(base, factors.beta), chunk, hv);
  }
}

}  // namespace

Status launch_wy_intra_bwd(const WyIntraBackwardParams& p, bool fp64, cudaStream_t stream) {
  return launch_chunks("wy_intra_bwd", wy_intra_bwd<float>, wy_intra_bwd<double>, kThreads,
                       kSharedElements, p, fp64, stream);
}

}  // namespace kda::cuda
