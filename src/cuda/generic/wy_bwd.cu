// The WY backward, one block a chunk and value head: the value half, which leaves R in memory, then
// the key half, which reads it.
//
// Shared memory, in elements: that of the larger half, 3 x 64 factors of rows.
#include "cuda/generic/chunk_launch.h"
#include "cuda/generic/wy_key.cuh"

namespace kda::cuda {
namespace {

constexpr int kFactors = WyKeyShared<float>::kElements;
constexpr int kSharedElements = kFactors + 3 * kTileRows;
static_assert(WyValueShared<float>::kElements <= kFactors);

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
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<Real>)
    wy_bwd(const __grid_constant__ WyBackwardParams p) {
  Real* const base = shared_memory<Real>();
  const RowFactors<Real> factors(base + kFactors);
  const WyValueShared<Real> value(base, factors.beta);
  const WyKeyShared<Real> key(base, factors);
  const int64_t tiles = p.sequences.chunk_rows * p.heads.HV;
  const int64_t G = p.heads.group;
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const int64_t hv = index % p.heads.HV;
    const int64_t row = index / p.heads.HV;
    const Chunk chunk = chunk_of(p.sequences, row);
    if (chunk.rows == 0) continue;
    __syncthreads();
    load_scalars(factors.rq, p.rq, chunk, hv / G, Real(1));
    load_scalars(factors.rk, p.rk, chunk, hv / G, Real(1));
    load_scalars(factors.beta, p.beta, chunk, hv, Real(0));
    Real through_value[4] = {};
    Real through_key[4] = {};
    value_half(p, value, chunk, hv, through_value);
    __syncthreads();  // R is in memory, and nobody reads the operands
    load_last_gamma(key.last, p.gamma, chunk, hv, p.heads.K, kMaxChannels);
    key_half(p, key, chunk, row, hv, through_key);
    if (p.dbeta.data) save_dbeta(p.dbeta, through_value, through_key, chunk, hv);
  }
}

}  // namespace

Status launch_wy_bwd(const WyBackwardParams& p, bool fp64, cudaStream_t stream) {
  return launch_chunks("wy_bwd", wy_bwd<float>, wy_bwd<double>, kThreads, kSharedElements, p, fp64,
                       stream);
}

}  // namespace kda::cuda
