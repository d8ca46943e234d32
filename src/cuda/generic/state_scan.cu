// The serial scan over chunks: (4.13)-(4.15). One block a sequence, value head and BV columns of V,
// which need no communication.
//
// Shared memory, in elements: state [K padded to 64][BV + 4], operand panel [32][68], v_new
// [64][BV + 4], decay [2][256].
#include "cuda/generic/stages.h"
#include "cuda/generic/state_tile.cuh"
#include "cuda/launch.h"

namespace kda::cuda {
namespace {

template <class Real, int COLUMNS>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<Real>)
    state_scan(const __grid_constant__ StateScanParams p) {
  using Tile = StateTile<Real, COLUMNS>;
  const int32_t K = p.heads.K;
  Real* const panel = shared_memory<Real>();
  Real* const v_new = panel + kStatePanel;
  const ChunkDecay<Real> decay(v_new + kTileRows * Tile::kStride);
  const Tile state{decay.factor + decay.kSize, K};
  const int64_t tiles = scan_tiles(p.sequences, p.heads, Tile::kColumns);
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const auto [v0, hv, sequence, range] = scan_tile(p.sequences, p.heads, Tile::kColumns, index);
    __syncthreads();
    state.load(p.initial_state, sequence, hv, v0, p.heads.V);
    typename Tile::RowPanel w;
    typename Tile::ColumnPanel kg;
    if (range.chunks > 0) load_tokens(w, p.w, chunk_in(range, 0, p.sequences.C), hv, 0, K);
    for (int64_t c = 0; c < range.chunks; ++c) {
      const Chunk chunk = chunk_in(range, c, p.sequences.C);
      typename Tile::Tokens value, product;
      fetch_tokens(value, p.u, chunk, hv, v0, p.heads.V);
      const Real last = last_gamma<Real>(p.gamma, chunk, hv, K);
      __syncthreads();  // the state is complete, and nobody reads the last chunk's operands
      if (p.h.data) state.save(p.h, range.first_chunk + c, hv, v0, p.heads.V);
      state.add_keys_times_state(product, w, p.w, chunk, hv, panel,
                                 [&] { load_tokens(kg, p.kg, chunk, hv, 0, K); });
      value.map([&](int m, int n, Real u) { return u - product.at(m, n); });
      save_tokens(value, p.v_new, chunk, hv, v0, p.heads.V);
      value.put_rows(v_new, Tile::kStride);
      decay.put(last);
      state.update(decay, [&](typename Tile::Keys& sum, int k0) {
        state.add_tokens_product(sum, kg, p.kg, chunk, hv, k0, v_new, Real(1), panel, [&] {
          if (k0 + kTileRows < K) {
            load_tokens(kg, p.kg, chunk, hv, k0 + kTileRows, K);
          } else if (c + 1 < range.chunks) {
            load_tokens(w, p.w, chunk_in(range, c + 1, p.sequences.C), hv, 0, K);
          }
        });
      });
    }
    __syncthreads();
    if (p.final_state.data) state.save(p.final_state, sequence, hv, v0, p.heads.V);
  }
}

}  // namespace

Status launch_state_scan(const StateScanParams& p, bool fp64, cudaStream_t stream) {
  if (p.sequences.T == 0 && p.final_state.data == nullptr) return {};  // however many sequences
  return launch_state_kernel<StateScanParams>(
      {"state_scan", state_scan<float, kWideColumns>, state_scan<float, kNarrowColumns>,
       state_scan<double, kFp64Columns>, 1},
      p, fp64, stream);
}

}  // namespace kda::cuda
