// Tiles of token tensors and checkpoints as panels: what every stage kernel loads.
#pragma once

#include "cuda/tile/panel.cuh"
#include "cuda/tile/sequence.cuh"

namespace kda::cuda {

/// The part of `extent` from `begin` on, at most 64.
__device__ __forceinline__ int rest_of(int64_t extent, int64_t begin) {
  const int64_t rest = extent - begin;
  return static_cast<int>(rest < kTileRows ? rest : kTileRows);
}

/// Columns col0.. of a chunk's rows token0.. of a tensor [B, T, heads, cols]. DepthFast panels take
/// tokens as rows and columns as depth, the others columns as rows and tokens as depth.
template <class Real, int ROWS, int DEPTH, bool DepthFast>
__device__ __forceinline__ void load_tokens(Panel<Real, ROWS, DEPTH, DepthFast>& panel,
                                            const Tensor& t, const Chunk& chunk, int64_t head,
                                            int64_t col0, int64_t cols, int token0 = 0) {
  const int64_t base =
      token_offset(t, chunk.batch, chunk.begin + token0, head) + col0 * t.stride[3];
  if constexpr (DepthFast) {
    panel.load(t, base, t.stride[1], t.stride[3], chunk.rows - token0, rest_of(cols, col0));
  } else {
    panel.load(t, base, t.stride[3], t.stride[1], rest_of(cols, col0), chunk.rows - token0);
  }
}

template <class Real, int ROWS, int DEPTH>
__device__ __forceinline__ void save_tokens(const Panel<Real, ROWS, DEPTH, false>& panel,
                                            const Tensor& t, const Chunk& chunk, int64_t head,
                                            int64_t col0, int64_t cols) {
  panel.save(t, token_offset(t, chunk.batch, chunk.begin, head) + col0 * t.stride[3], t.stride[3],
             t.stride[1], rest_of(cols, col0), chunk.rows);
}

/// The same tile held as an accumulator: rows are tokens.
template <class Real, int TM, int TN>
__device__ __forceinline__ void fetch_tokens(Accumulator<Real, TM, TN>& tile, const Tensor& t,
                                             const Chunk& chunk, int64_t head, int64_t col0,
                                             int64_t cols) {
  tile.fetch(t, token_offset(t, chunk.batch, chunk.begin, head) + col0 * t.stride[3], t.stride[1],
             t.stride[3], chunk.rows, rest_of(cols, col0));
}

template <class Real, int TM, int TN>
__device__ __forceinline__ void save_tokens(const Accumulator<Real, TM, TN>& tile, const Tensor& t,
                                            const Chunk& chunk, int64_t head, int64_t col0,
                                            int64_t cols) {
  if (!t.data) return;
  tile.save(t, token_offset(t, chunk.batch, chunk.begin, head) + col0 * t.stride[3], t.stride[1],
            t.stride[3], chunk.rows, rest_of(cols, col0));
}

/// Rows k0.., columns v0.. of the checkpoint [K, V] of a chunk row and value head. DepthFast: k are
/// the panel's rows, v its depth; otherwise v are rows and k depth.
template <class Real, int ROWS, int DEPTH, bool DepthFast>
__device__ __forceinline__ void load_checkpoint(Panel<Real, ROWS, DEPTH, DepthFast>& panel,
                                                const Tensor& h, int64_t row, int64_t hv,
                                                int32_t k0, int32_t K, int64_t v0, int64_t V) {
  const int64_t base = row * h.stride[0] + hv * h.stride[1] + k0 * h.stride[2] + v0 * h.stride[3];
  if constexpr (DepthFast) {
    panel.load(h, base, h.stride[2], h.stride[3], K - k0, rest_of(V, v0));
  } else {
    panel.load(h, base, h.stride[3], h.stride[2], rest_of(V, v0), K - k0);
  }
}

/// A chunk's scalars of a tensor [B, T, heads] into shared[64]: `absent` where the tensor is
/// absent, 0 on rows beyond the chunk.
template <class Real>
__device__ __forceinline__ void load_scalars(Real* shared, const Tensor& t, const Chunk& chunk,
                                             int64_t head, Real absent) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= kTileRows) return;
  Real value = 0;
  if (i < chunk.rows) {
    value = t.data ? load<Real>(t, token_offset(t, chunk.batch, chunk.begin + i, head)) : absent;
  }
  shared[i] = value;
}

inline constexpr int kMaxChannels = 256;  ///< K

/// Factors of a chunk's rows, [64] each.
template <class Real>
struct RowFactors {
  Real *rq, *rk, *beta;

  __device__ explicit RowFactors(Real* base) : rq(base), rk(rq + kTileRows), beta(rk + kTileRows) {}
};

/// gamma of a chunk's last valid row, channels < K, into shared[0..padded); 0 from K on.
template <class Real>
__device__ __forceinline__ void load_last_gamma(Real* shared, const Tensor& gamma,
                                                const Chunk& chunk, int64_t hv, int32_t K,
                                                int32_t padded) {
  const int64_t base = token_offset(gamma, chunk.batch, chunk.begin + chunk.rows - 1, hv);
  for (int k = static_cast<int>(threadIdx.x); k < padded; k += kThreads) {
    shared[k] = k < K ? load<Real>(gamma, base + k * gamma.stride[3]) : Real(0);
  }
}

/// Sum over the 16 threads that hold one row of an accumulator, in each of them.
template <class Real>
__device__ __forceinline__ Real row_sum(Real x) {
  for (int step = 8; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

}  // namespace kda::cuda
