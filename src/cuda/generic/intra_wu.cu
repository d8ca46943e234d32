// Scores, inverse and gated operands, one block a chunk and value head: (4.4)-(4.7), (4.9)-(4.12).
// The stages intra and wu take one half each; the whole operations both in one launch, with A in
// shared memory between them.
//
// Shared memory, in elements: q, k, Gamma panels [32][68] each (later P, then A, then a right-hand
// side [64][68]), L [64][65] (later, from the end of A on, A^T [64][68]), 3 x 64 factors of rows,
// Gamma of the last row [256]. 89 KB in fp64.
#include "cuda/generic/chunk_launch.h"
#include "cuda/generic/wu.cuh"

namespace kda::cuda {
namespace {

constexpr int kTransposed = kTileRows * kInverseStride;  // where A^T begins, behind A
constexpr int kFactors = ScoreShared<float>::kElements;
constexpr int kSharedElements = kFactors + 3 * kTileRows + kMaxChannels;
static_assert(kTransposed + kSolveTile <= kFactors && kSolveTile <= kTransposed);

template <class Real>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<Real>)
    intra_wu(const __grid_constant__ IntraWuParams p) {
  Real* const base = shared_memory<Real>();
  const ScoreShared<Real> scores(base);
  const RowFactors<Real> factors(base + kFactors);
  const WuShared<Real> operands{base, base + kTransposed, base + kFactors + 3 * kTileRows, factors};
  const bool wants_operands = p.w.data || p.u.data || p.kg.data || p.qg.data;
  const int64_t tiles = p.sequences.chunk_rows * p.heads.HV;
  const TriangleTile tile = triangle_tile(p.sequences.C);
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const int64_t hv = index % p.heads.HV;
    const int64_t h = hv / p.heads.group;
    const Chunk chunk = chunk_of(p.sequences, index / p.heads.HV);
    if (chunk.rows == 0) continue;
    __syncthreads();
    load_scalars(factors.rq, p.rq, chunk, h, Real(1));
    load_scalars(factors.rk, p.rk, chunk, h, Real(1));
    load_scalars(factors.beta, p.beta, chunk, hv, Real(0));
    if (wants_operands) load_last_gamma(operands.last, p.gamma, chunk, hv, p.heads.K, kMaxChannels);
    if (p.given_A.data) {
      Panel<Real, kTileRows, kTileRows, true> A;
      load_tokens(A, p.given_A, chunk, hv, 0, p.sequences.C);
      A.put(operands.A);
    } else {
      find_scores(p, scores, factors, chunk, h, hv, tile);
      if (p.Aqk.data) save_triangle(p.Aqk, scores.P(), kScoreStride, chunk, hv, p.sequences.C);
      if (!p.A.data && !wants_operands) continue;
      __syncthreads();
      invert(scores.L, scores.A(), chunk.rows);
      __syncthreads();
      if (p.A.data) save_triangle(p.A, scores.A(), kInverseStride, chunk, hv, p.sequences.C);
      if (wants_operands) transpose_inverse(scores.A(), operands.A, chunk.rows);
    }
    __syncthreads();
    if (wants_operands) find_operands(p, operands, chunk, h, hv);
  }
}

}  // namespace

Status launch_intra_wu(const IntraWuParams& p, bool fp64, cudaStream_t stream) {
  return launch_chunks("intra_wu", intra_wu<float>, intra_wu<double>, kThreads, kSharedElements, p,
                       fp64, stream);
}

}  // namespace kda::cuda
