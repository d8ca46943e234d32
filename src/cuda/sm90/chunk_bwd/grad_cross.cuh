// Pairs of chunks: between the states h before and dh behind both there are none. The later chunk's
// products with the earlier one's tokens stand in for what h would have brought it, and for what dh
// would have brought the earlier one:
//   [dP | dL]_ba = [do; R]_b v_new_a^T            32 x 32 each, nothing masked
//   [dqe | Y]_b = 2^G_end,a (h_a [do; R]_b) + kg_a [dP | dL]_ba
//   dkx_a = 2^G_end,b (dh_b v_new_a)              which is a state's part,
//   dkg_a = [dP; dL]_ba^T [q; beta k]_b           and this belongs to pairs of tokens, (5.32)
// The later chunk comes first. It has all of these operands but kg, a tile of the earlier chunk's
// record, and leaves dkx and dkg in global memory, where each thread finds its own again.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/chunk_bwd/grad_intra.cuh"

namespace kda::cuda::sm90 {

template <class Io, int K>
struct GradCross {
  using Traits = GradTraits<Io, K>;

  GradShared<Io, K>& shared;
  const GradParams& p;
  const GradWork& work;
  int warp;
  int lane;

  /// Four of the 32 values that this thread carries over.
  __device__ __forceinline__ float4& carried(int i) const {
    return p.carry[(static_cast<int64_t>(blockIdx.x) * 8 + i) * Traits::kThreads + thread_index()];
  }

  /// The later chunk, kg and C in shared memory. S: the products with h, then all but the factor of
  /// its rows' blocks. dkx: behind the 16 of this chunk, dh v_new of the earlier one.
  __device__ __forceinline__ void add_states(float (&S)[32], float (&dkx)[32]) const {
    const GradLane at(warp, lane);
    wait_for(&shared.update_full, work.crossings % 2);
    if constexpr (Traits::kHasUnits) split_update();
    const float before[2] = {shared.decay_before[at.channel(0)],
                             shared.decay_before[at.channel(1)]};
    GradLane::each([&](int r, int, int c, int) {
      S[r] *= p.scale * before[c];
      S[16 + r] *= -unit_of(shared, p) * before[c];
    });
    leave_states(dkx, at);
    const PanelTile<kChunk> kg{fresh_address(shared.intra.keys[warp / 4].update)};
    wgmma_fence();
    add_rows(S, kg, 0);
    add_rows(S, kg, kRestOfScores);
    if constexpr (Traits::kHasUnits) {
      add_rows(S, {fresh_address(shared.extra.update_rest[warp / 4])}, 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
  }

  /// Once the operands of its rows are in shared memory.
  __device__ __forceinline__ void leave_keys() const {
    const GradLane at(warp, lane);
    float dkg[32];
    wgmma_fence();
    // Block 1 of the rows first: its reference is 2^(G_16 - first) of that of block 0.
    add_block(dkg, 1, false);
    wgmma_commit();
    const float first[2] = {shared.G[0][at.channel(0)], shared.G[0][at.channel(1)]};
    const float factor[2] = {exp2_of(shared.G[kBlock][at.channel(0)] - first[0]),
                             exp2_of(shared.G[kBlock][at.channel(1)] - first[1])};
    wgmma_wait<0>();
    GradLane::each([&](int r, int, int c, int) {
      dkg[r] *= factor[c];
      dkg[16 + r] *= factor[c];
    });
    wgmma_fence();
    add_block(dkg, 0, true);
    wgmma_commit();
    const float entering[2] = {exp2_of(first[0]), exp2_of(first[1])};
    wgmma_wait<0>();
    GradLane::each([&](int r, int, int c, int) { dkg[r] = entering[c] * (dkg[r] + dkg[16 + r]); });
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      carried(4 + i) = {dkg[4 * i], dkg[4 * i + 1], dkg[4 * i + 2], dkg[4 * i + 3]};
    }
  }

  /// fp16's kg as two bf16 numbers, which hold it exactly, before the warpgroup reads it.
  __device__ __forceinline__ void split_update() const {
    auto* const larger = reinterpret_cast<uint32_t*>(shared.intra.keys[warp / 4].update);
    auto* const rest = reinterpret_cast<uint32_t*>(shared.extra.update_rest[warp / 4]);
    constexpr int kWords = kChunk * kPanelRowBytes / 4;
#pragma unroll 4
    for (int i = thread_index() % 128; i < kWords; i += 128) {
      const float2 x = unpack<Io>(larger[i]);
      larger[i] = pack<Bf16>(x.x, x.y);
      const float2 left = rest_of(x);
      rest[i] = pack<Bf16>(left.x, left.y);
    }
    ptx::fence_proxy_async(ptx::space_shared);
    sync_group();
  }

  /// Among the threads of this warpgroup.
  __device__ __forceinline__ void sync_group() const {
    if (warp < 4) {  // numbers that ptxas knows: else it would set all 16 aside
      barrier_sync(1, 128);
    } else {
      barrier_sync(2, 128);
    }
  }

  /// S += kg C, with one term of C = [dP | dL] over the earlier chunk.
  __device__ __forceinline__ void add_rows(float (&S)[32], const PanelTile<kChunk>& kg,
                                           uint64_t term) const {
    const PanelTile<2 * kChunk> cross{fresh_address(shared.intra.cross)};
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step) {
      wgmma_ss<Bf16, Major::kOuter, Major::kSummed>(S, kg.rows(step), cross.columns(step) + term,
                                                    true);
    }
  }

  /// dkg += C^T of the rows of a block.
  __device__ __forceinline__ void add_block(float (&dkg)[32], int block, bool add) const {
    const PanelTile<2 * kChunk> rows{fresh_address(shared.intra.keys[warp / 4].rows[0])};
    const PanelTile<2 * kChunk> cross{fresh_address(shared.intra.cross)};
#pragma unroll
    for (int step = block; step < 4; step += 2) {
      // Both terms of the scores side by side.
      wgmma_ss<Bf16, Major::kOuter, Major::kOuter>(dkg, rows.rows(step), cross.rows(step),
                                                   add || step > block);
      wgmma_ss<Bf16, Major::kOuter, Major::kOuter>(part_of<16>(dkg), second_term(rows).rows(step),
                                                   cross.rows(step), true);
    }
  }

  /// The earlier chunk's dkx but for the mantissa, in fp16 at full scale, and rowsum(kg . dkx).
  __device__ __forceinline__ void leave_states(float (&dkx)[32], const GradLane& at) const {
    const float end[2] = {exp2_of(shared.G[kChunk - 1][at.channel(0)]),
                          exp2_of(shared.G[kChunk - 1][at.channel(1)])};
    const uint32_t block_bytes = kBlock * kPanelRowBytes;
    const uint32_t kg_row = fragment_row(shared.intra.keys[warp / 4].update, warp, lane);
    float sum[2] = {};
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const TokenFragment<Bf16> kg(kg_row + static_cast<uint32_t>(block) * block_bytes);
#pragma unroll
      for (int r = 8 * block; r < 8 * block + 8; ++r) {
        const int c = r / 2 % 2;
        dkx[16 + r] *= end[c];
        sum[c] = fmaf(kg(r / 4, c, r % 2), dkx[16 + r], sum[c]);
      }
      if constexpr (Traits::kHasUnits) {
        const TokenFragment<Bf16> rest(
            fragment_row(shared.extra.update_rest[warp / 4], warp, lane) +
            static_cast<uint32_t>(block) * block_bytes);
#pragma unroll
        for (int r = 8 * block; r < 8 * block + 8; ++r) {
          const int c = r / 2 % 2;
          sum[c] = fmaf(rest(r / 4, c, r % 2), dkx[16 + r], sum[c]);
          dkx[16 + r] *= unit_of(shared, p);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      carried(i) = {dkx[16 + 4 * i], dkx[17 + 4 * i], dkx[18 + 4 * i], dkx[19 + 4 * i]};
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      for (int step = 1; step < 4; step *= 2) sum[c] += __shfl_xor_sync(~0u, sum[c], step);
      if (lane % 4 == 0) shared.update_product[at.channel(c)] = unit_of(shared, p) * sum[c];
    }
  }

  /// The earlier chunk: what the later one left.
  __device__ __forceinline__ void take_dkx(float (&dkx)[32]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) take(dkx + 4 * i, i);
    if constexpr (Traits::kHasUnits) {
      const float inverse = 1 / unit_of(shared, p);
#pragma unroll
      for (int i = 0; i < 16; ++i) dkx[i] *= inverse;
    }
  }
  template <int BLOCK>
  __device__ __forceinline__ void take_dkg(float (&dkg)[8]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) take(dkg + 4 * i, 4 + 2 * BLOCK + i);
  }
  __device__ __forceinline__ void take(float* to, int i) const {
    const float4 x = carried(i);
    to[0] = x.x;
    to[1] = x.y;
    to[2] = x.z;
    to[3] = x.w;
  }
};

}  // namespace kda::cuda::sm90
