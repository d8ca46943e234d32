// The serial scan over chunks in reverse: (5.3)-(5.6). Blocks and shared memory as in state_scan,
// with one more tile [64][BV + 4] for do.
#include "cuda/generic/stages.h"
#include "cuda/generic/state_tile.cuh"
#include "cuda/launch.h"

namespace kda::cuda {
namespace {

/// dv_new += Aqk^T do; the strictly upper part of Aqk counts as 0 whatever is stored there.
template <class Real, class Tokens>
__device__ void add_scores_product(Tokens& dv_new, const Tensor& Aqk, const Chunk& chunk,
                                   int64_t hv, int32_t C, const Real* grad_o, Real* shared) {
  for (int i0 = 0; i0 < chunk.rows; i0 += kStateDepth) {
    Panel<Real, kTileRows, kStateDepth, false> panel;
    load_tokens(panel, Aqk, chunk, hv, 0, C, i0);
    __syncthreads();
    panel.put(shared);
    __syncthreads();
    dv_new.add_product_if(shared, kPanelStride, grad_o + i0 * StateTile<Real>::kStride,
                          StateTile<Real>::kStride, kStateDepth,
                          [&](int j, int i) { return j <= i0 + i; });
  }
}

template <class Real>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<Real>)
    reverse_scan(const __grid_constant__ ReverseScanParams p) {
  using Tile = StateTile<Real>;
  const int32_t K = p.heads.K;
  Real* const panel = shared_memory<Real>();
  Real* const dv_new = panel + kStatePanel;
  Real* const grad_o = dv_new + kTileRows * Tile::kStride;
  Real* const decay = grad_o + kTileRows * Tile::kStride;
  const Tile state{decay + kMaxK, K};
  const int64_t tiles = scan_tiles(p.sequences, p.heads, Tile::kColumns);
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const auto [v0, hv, sequence, range] = scan_tile(p.sequences, p.heads, Tile::kColumns, index);
    __syncthreads();
    state.load(p.dfinal_state, sequence, hv, v0, p.heads.V);
    for (int64_t c = range.chunks - 1; c >= 0; --c) {
      const Chunk chunk = chunk_in(range, c, p.sequences.C);
      typename Tile::Tokens tile;
      fetch_tokens(tile, p.grad_o, chunk, hv, v0, p.heads.V);
      __syncthreads();  // the state is complete, and nobody reads the last chunk's operands
      load_last_gamma(decay, p.gamma, chunk, hv, K, kMaxK);
      tile.put_rows(grad_o, Tile::kStride);
      if (p.dh.data) state.save(p.dh, range.first_chunk + c, hv, v0, p.heads.V);
      tile = {};
      state.add_keys_times_state(tile, p.kg, chunk, hv, panel);
      add_scores_product(tile, p.Aqk, chunk, hv, p.sequences.C, grad_o, panel);
      save_tokens(tile, p.dv_new, chunk, hv, v0, p.heads.V);
      tile.put_rows(dv_new, Tile::kStride);
      state.update(decay, [&](typename Tile::Keys& sum, int k0) {
        state.add_tokens_product(sum, p.qg, chunk, hv, k0, grad_o, static_cast<Real>(p.scale),
                                 panel);
        state.add_tokens_product(sum, p.w, chunk, hv, k0, dv_new, Real(-1), panel);
      });
    }
    __syncthreads();
    if (p.dinitial_state.data) state.save(p.dinitial_state, sequence, hv, v0, p.heads.V);
  }
}

}  // namespace

Status launch_reverse_scan(const ReverseScanParams& p, bool fp64, cudaStream_t stream) {
  return launch_state_kernel("reverse_scan", reverse_scan<float>, reverse_scan<double>, 2, p, fp64,
                             stream);
}

}  // namespace kda::cuda
