// The serial scan over chunks in reverse: (5.3)-(5.6). Blocks and shared memory as in state_scan,
// with one more tile [64][BV + 4] for do.
#include "cuda/generic/stages.h"
#include "cuda/generic/state_tile.cuh"
#include "cuda/launch.h"

namespace kda::cuda {
namespace {

/// dv_new += Aqk^T do, of Aqk `panel` holds the first rows; its strictly upper part counts as 0
/// whatever is stored there.
template <class Tile, class Real, class Next>
__device__ void add_scores_product(typename Tile::Tokens& dv_new, typename Tile::ColumnPanel& panel,
                                   const Tensor& Aqk, const Chunk& chunk, int64_t hv, int32_t C,
                                   const Real* grad_o, Real* shared, Next next) {
  for (int i0 = 0; i0 < chunk.rows; i0 += kStateDepth) {
    __syncthreads();
    panel.put(shared);
    __syncthreads();
    if (i0 + kStateDepth < chunk.rows) {
      load_tokens(panel, Aqk, chunk, hv, 0, C, i0 + kStateDepth);
    } else {
      next();
    }
    dv_new.add_product_if(shared, kPanelStride, grad_o + i0 * Tile::kStride, Tile::kStride,
                          kStateDepth, [&](int j, int i) { return j <= i0 + i; });
  }
}

template <class Real, int COLUMNS>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<Real>)
    reverse_scan(const __grid_constant__ ReverseScanParams p) {
  using Tile = StateTile<Real, COLUMNS>;
  const int32_t K = p.heads.K;
  Real* const panel = shared_memory<Real>();
  Real* const dv_new = panel + kStatePanel;
  Real* const grad_o = dv_new + kTileRows * Tile::kStride;
  const ChunkDecay<Real> decay(grad_o + kTileRows * Tile::kStride);
  const Tile state{decay.factor + decay.kSize, K};
  const int64_t tiles = scan_tiles(p.sequences, p.heads, Tile::kColumns);
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const auto [v0, hv, sequence, range] = scan_tile(p.sequences, p.heads, Tile::kColumns, index);
    __syncthreads();
    state.load(p.dfinal_state, sequence, hv, v0, p.heads.V);
    typename Tile::RowPanel kg;
    typename Tile::ColumnPanel operand;
    const auto start = [&](int64_t c) {
      if (c >= 0) load_tokens(kg, p.kg, chunk_in(range, c, p.sequences.C), hv, 0, K);
    };
    start(range.chunks - 1);
    for (int64_t c = range.chunks - 1; c >= 0; --c) {
      const Chunk chunk = chunk_in(range, c, p.sequences.C);
      typename Tile::Tokens tile, grad;
      fetch_tokens(grad, p.grad_o, chunk, hv, v0, p.heads.V);
      const Real last = last_gamma<Real>(p.gamma, chunk, hv, K);
      __syncthreads();  // the state is complete, and nobody reads the last chunk's operands
      if (p.dh.data) state.save(p.dh, range.first_chunk + c, hv, v0, p.heads.V);
      state.add_keys_times_state(tile, kg, p.kg, chunk, hv, panel,
                                 [&] { load_tokens(operand, p.Aqk, chunk, hv, 0, p.sequences.C); });
      decay.put(last);
      grad.put_rows(grad_o, Tile::kStride);
      add_scores_product<Tile>(tile, operand, p.Aqk, chunk, hv, p.sequences.C, grad_o, panel,
                               [&] { load_tokens(operand, p.qg, chunk, hv, 0, K); });
      save_tokens(tile, p.dv_new, chunk, hv, v0, p.heads.V);
      tile.put_rows(dv_new, Tile::kStride);
      state.update(decay, [&](typename Tile::Keys& sum, int k0) {
        state.add_tokens_product(sum, operand, p.qg, chunk, hv, k0, grad_o,
                                 static_cast<Real>(p.scale), panel,
                                 [&] { load_tokens(operand, p.w, chunk, hv, k0, K); });
        state.add_tokens_product(sum, operand, p.w, chunk, hv, k0, dv_new, Real(-1), panel, [&] {
          if (k0 + kTileRows < K) {
            load_tokens(operand, p.qg, chunk, hv, k0 + kTileRows, K);
          } else {
            start(c - 1);
          }
        });
      });
    }
    __syncthreads();
    if (p.dinitial_state.data) state.save(p.dinitial_state, sequence, hv, v0, p.heads.V);
  }
}

}  // namespace

Status launch_reverse_scan(const ReverseScanParams& p, bool fp64, cudaStream_t stream) {
  if (p.sequences.T == 0 && p.dinitial_state.data == nullptr) return {};  // however many sequences
  return launch_state_kernel<ReverseScanParams>(
      {"reverse_scan", reverse_scan<float, kWideColumns>, reverse_scan<float, kNarrowColumns>,
       reverse_scan<double, kFp64Columns>, 2},
      p, fp64, stream);
}

}  // namespace kda::cuda
