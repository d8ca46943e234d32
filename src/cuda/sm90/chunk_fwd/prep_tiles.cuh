// Norms of q and k, and phase 2 of prep: operands with their decays, to the record and to shared
// memory.
#pragma once

#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma_sync.cuh"
#include "cuda/sm90/chunk_fwd/prep_shared.cuh"

namespace kda::cuda::sm90 {

/// 1 / |row| of the warp's rows of q and k: the diagonals of q q^T and k k^T.
template <class Io, int K>
__device__ __forceinline__ void norm_rows(PrepShared<Io, K>& shared, bool wanted, int first) {
  const int lane = this_thread() % 32;
  const int g = lane / 4;
  float2 norm{1, 1};
  if (wanted) {
    float q[4] = {};
    float k[4] = {};
    const auto* const raw = lane / 8 % 2 == 0 ? shared.rows.raw_q() : shared.rows.raw_k();
    const auto at =
        static_cast<uint32_t>(__cvta_generic_to_shared(&raw[first + lane % 8][lane / 16 * 8]));
#pragma unroll
    for (int step = 0; step < K / 16; ++step) {
      uint32_t row[4];  // q, k, then the same of the next 8 columns
      ldmatrix(row, at + 32 * step);
      const uint32_t column[4] = {row[0], row[2], row[1], row[3]};
      if constexpr (kIsBf16<Io>) {
        mma_bf16(q, row, column);
        mma_bf16(k, row, column + 2);
      } else {
        mma_fp16(q, row, column);
        mma_fp16(k, row, column + 2);
      }
    }
    norm = {rsqrtf((g % 2 == 0 ? q[0] : q[1]) + 1e-6f), rsqrtf((g % 2 == 0 ? k[2] : k[3]) + 1e-6f)};
  }
  if (lane % 4 == g / 2) shared.norm[first + g] = norm;
}

/// log2 decay of a whole block in this lane's columns.
template <class Io, int K>
__device__ __forceinline__ void sum_block(float2 (&total)[K / 64], const PrepShared<Io, K>& shared,
                                          int block, int column) {
  float2 second[K / 64];
  load_pairs(total, &shared.totals[2 * block][column]);
  load_pairs(second, &shared.totals[2 * block + 1][column]);
#pragma unroll
  for (int i = 0; i < K / 64; ++i) total[i] = total[i] + second[i];
}

/// NaN counts as far: tokens before it may be.
template <int PAIRS>
__device__ __forceinline__ bool any_far(const float2 (&total)[PAIRS]) {
  bool far = false;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    far = far || !(total[i].x >= -kFarBlock) || !(total[i].y >= -kFarBlock);
  }
  return __any_sync(~0u, far) != 0;
}

/// The decay of the tokens of a warp's block that are not its own.
template <class Io, int K>
__device__ __forceinline__ void sum_before(float2 (&before)[K / 64],
                                           const PrepShared<Io, K>& shared, int warp, int column) {
#pragma unroll
  for (float2& x : before) x = {0, 0};
  if (warp % 2 != 0) load_pairs(before, &shared.totals[warp - 1][column]);
}

/// What a lane knows of the decay of its columns beyond its own tokens.
template <int PAIRS>
struct ColumnDecay {
  float2 factor[2][PAIRS];  ///< 2^ the sums of whole blocks
  float2 before[PAIRS];     ///< what sum_before gives
  bool far[2];              ///< a column's factor is below 2^-kFarBlock
};

template <class Io, int K>
__device__ __forceinline__ ColumnDecay<K / 64> column_decay(const PrepShared<Io, K>& shared,
                                                            int warp, int column) {
  ColumnDecay<K / 64> decay;
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    float2 total[K / 64];
    sum_block(total, shared, block, column);
    decay.far[block] = any_far(total);
#pragma unroll
    for (int i = 0; i < K / 64; ++i) decay.factor[block][i] = exp2_pair(total[i]);
  }
  sum_before(decay.before, shared, warp, column);
  return decay;
}

/// Columns of a token of block kOf, from G', raw q and raw k. read, update: where its row of these
/// parts of the record begins for this lane, swizzled.
template <class Io, int K, int kOf>
__device__ __forceinline__ void write_token(PrepShared<Io, K>& shared,
                                            const ColumnDecay<K / 64>& decay, int row, int column,
                                            float2 (&G)[K / 64], float2 (&q)[K / 64],
                                            float2 (&k)[K / 64], uint64_t read, uint64_t update) {
  constexpr int kPairs = K / 64;
  constexpr bool kSame = kOf == 0 && kIsBf16<Io>;  // tiles and record hold the same rows
  const float2 norm = shared.norm[row];
  float2 last[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    G[i] = G[i] + decay.before[i];
    k[i] = k[i] * norm.y;
    last[i] = k[i] * exp2_pair(-G[i]);
  }
  put_pairs(&shared.down()[row][column], last);
  if (decay.far[kOf]) {  // 2^-G' may be infinite
    sum_block(last, shared, kOf, column);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) last[i] = k[i] * exp2_pair(last[i] - G[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) last[i] = last[i] * decay.factor[kOf][i];
  }
  if constexpr (kOf == 0) {
    put_pairs(&shared.rows.cross()[row][column], last);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) last[i] = last[i] * decay.factor[1][i];
  }
  store_global(update, pack_pairs<Io>(last));
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const float2 up = exp2_pair(G[i]);
    q[i] = q[i] * norm.x * up;
    k[i] = k[i] * up;
  }
  if constexpr (!kSame) {
    put_pairs(&shared.rows.q[row][column], q);
    put_pairs(&shared.rows.k[row][column], k);
  }
  if constexpr (kOf == 1) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      q[i] = q[i] * decay.factor[0][i];
      k[i] = k[i] * decay.factor[0][i];
    }
  }
  const Words<kPairs> qe = pack_pairs<Io>(q);
  const Words<kPairs> ke = pack_pairs<Io>(k);
  if constexpr (kSame) {
    *reinterpret_cast<Words<kPairs>*>(&shared.rows.q[row][column]) = qe;
    *reinterpret_cast<Words<kPairs>*>(&shared.rows.k[row][column]) = ke;
  }
  store_global(read, ke);
  store_global(read + kChunk * kPanelRowBytes, qe);
}

/// Phase 2 of a warp of block kOf; whether one of the blocks is far. Rows that do not exist hold
/// zeros.
template <class Io, int K, int kOf>
__device__ __forceinline__ bool write_tiles(PrepShared<Io, K>& shared, uint64_t record, int warp,
                                            int column) {
  using R = Record<K>;
  constexpr int kPairs = K / 64;
  constexpr int kAtOnce = 2;
  const ColumnDecay<kPairs> decay = column_decay(shared, warp, column);
  const int first = 8 * warp;
  // Records start at multiples of 128 bytes: the swizzle is an XOR of address bits 4 to 6.
  const auto place = static_cast<uint32_t>(first * kPanelRowBytes + column % 64 * 2);
  uint64_t read = record + (R::kRead + column / 64 * (2 * kChunk * kPanelRowBytes)) + place;
  uint64_t update = record + (R::kUpdate + column / 64 * (kChunk * kPanelRowBytes)) + place;
#pragma unroll 1
  for (int t = 0; t < 8; t += kAtOnce) {
    float2 G[kAtOnce][kPairs];
    float2 q[kAtOnce][kPairs];
    float2 k[kAtOnce][kPairs];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      load_pairs(G[u], shared.G(first + t + u) + column);
      load_pairs(q[u], &shared.rows.raw_q()[first + t + u][column]);
      load_pairs(k[u], &shared.rows.raw_k()[first + t + u][column]);
    }
    __syncwarp();  // tiles take the place of other lanes' sums
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const auto swizzle = static_cast<uint64_t>(static_cast<uint32_t>(t + u) << 4);
      const auto offset = static_cast<uint64_t>(u * kPanelRowBytes);
      write_token<Io, K, kOf>(shared, decay, first + t + u, column, G[u], q[u], k[u],
                              (read ^ swizzle) + offset, (update ^ swizzle) + offset);
    }
    read += kAtOnce * kPanelRowBytes;
    update += kAtOnce * kPanelRowBytes;
  }
  return decay.far[0] || decay.far[1];
}

/// 2^G_end to the record.
template <class Io, int K>
__device__ __forceinline__ void write_decay(const PrepShared<Io, K>& shared, uint64_t record,
                                            int column) {
  float2 total[2][K / 64];
  sum_block(total[0], shared, 0, column);
  sum_block(total[1], shared, 1, column);
#pragma unroll
  for (int i = 0; i < K / 64; ++i) {
    const float2 end = exp2_pair(total[0][i] + total[1][i]);
    store_global(record + static_cast<uint32_t>(Record<K>::kDecay + (column + 2 * i) * 4),
                 Words<2>{__float_as_uint(end.x), __float_as_uint(end.y)});
  }
}

}  // namespace kda::cuda::sm90
