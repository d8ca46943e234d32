// The value half of the WY backward, one block a chunk and value head: R = A^T dv_new (5.10),
// dv (5.11), rowsum_V(R . v) (5.12), dP (5.2) and dL (5.28).
//
// Shared memory, in elements: A [64][68]; dv_new [64][36], later v_new^T [32][68]; R^T and do^T
// [32][68] each; beta [64].
#include "cuda/generic/chunk_launch.h"
#include "cuda/generic/stages.h"
#include "cuda/tile/chunk_tile.cuh"

namespace kda::cuda {
namespace {

constexpr int kColumns = 32;  // of V in shared memory at a time
constexpr int kPanel = kColumns * kPanelStride;
constexpr int kValueStride = kColumns + 4;
constexpr int kValue = kTileRows * kValueStride;
constexpr int kSharedElements = kTileRows * kPanelStride + kValue + 2 * kPanel + kTileRows;

template <class Real>
struct WyShared {
  Real *A, *value, *R, *grad_o, *beta;

  __device__ explicit WyShared(Real* base)
      : A(base),
        value(A + kTileRows * kPanelStride),
        R(value + kValue),
        grad_o(R + kPanel),
        beta(grad_o + kPanel) {}
};

/// R, dv and the row sums of R . v for columns v0.., R^T into shared memory.
template <class Real>
__device__ void solve_columns(const WyValueParams& p, const WyShared<Real>& shared,
                              const Chunk& chunk, int64_t hv, int64_t v0, Real (&dbeta)[4]) {
  Panel<Real, kColumns, kTileRows, false> dv_new;
  Panel<Real, kTileRows, kColumns, true> grad_o, v_new;
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

template <class Real>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<Real>)
    wy_value(const __grid_constant__ WyValueParams p) {
  const WyShared<Real> shared(shared_memory<Real>());
  const int64_t tiles = p.sequences.chunk_rows * p.heads.HV;
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const int64_t hv = index % p.heads.HV;
    const Chunk chunk = chunk_of(p.sequences, index / p.heads.HV);
    if (chunk.rows == 0) continue;
    Panel<Real, kTileRows, kTileRows, false> A;
    load_tokens(A, p.A, chunk, hv, 0, p.sequences.C);
    __syncthreads();
    A.put(shared.A);
    load_scalars(shared.beta, p.beta, chunk, hv, Real(0));
    Accumulator<Real, 4, 4> dP, dL;
    Real dbeta[4] = {};
    for (int64_t v0 = 0; v0 < p.heads.V; v0 += kColumns) {
      solve_columns(p, shared, chunk, hv, v0, dbeta);
      dP.add_product(shared.grad_o, kPanelStride, shared.value, kPanelStride, kColumns);
      dL.add_product(shared.R, kPanelStride, shared.value, kPanelStride, kColumns);
    }
    dP.map([&](int i, int j, Real x) { return j <= i ? static_cast<Real>(p.scale) * x : Real(0); });
    dL.map([](int i, int j, Real x) { return j < i ? -x : Real(0); });
    save_tokens(dP, p.dP, chunk, hv, 0, p.sequences.C);
    save_tokens(dL, p.dL, chunk, hv, 0, p.sequences.C);
    if (!p.dbeta.data) continue;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const Real sum = row_sum(dbeta[m]);
      const int i = Accumulator<Real, 4, 4>::row(m);
      if (threadIdx.x % 16 == 0 && i < chunk.rows) {
        store<Real>(p.dbeta, token_offset(p.dbeta, chunk.batch, chunk.begin + i, hv), sum);
      }
    }
  }
}

}  // namespace

Status launch_wy_value(const WyValueParams& p, bool fp64, cudaStream_t stream) {
  return launch_chunks("wy_value", wy_value<float>, wy_value<double>, kThreads, kSharedElements, p,
                       fp64, stream);
}

}  // namespace kda::cuda
