// The second half of prep: scaled tiles in shared memory -> scores and the solved matrix.
//
// Scores are products of 16 x 16 blocks. Rows of block b are q and k times 2^(G_i - ref_b), where
// ref_b is G of the block's first row; columns are k times 2^(ref_b - G_j): `down` in the diagonal
// blocks, `cross` for block 1 above block 0. All factors are at most 1 but `down`, at most
// 2^kFarRow. Rows beyond that are computed pair by pair (replace_far_rows).
//
// bf16: tiles are bf16, products m16n8k16. fp16 has not the range of 2^kFarRow: tiles are fp32,
// products tf32.
#pragma once

#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma_sync.cuh"
#include "cuda/sm90/chunk_fwd/chunk_fwd.h"
#include "cuda/sm90/chunk_fwd/config.h"
#include "cuda/tile/fast_gate.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/sequence.cuh"

namespace kda::cuda::sm90 {

/// log2 of the largest factor. -5 a token over 15 tokens is 108.2; below 2^-126 fp32 and bf16 lose
/// bits, and q and k need some room.
inline constexpr float kFarRow = 110;
inline constexpr int kBlock = 16;

/// threadIdx.x, read anew each time: addresses made from it are not kept across items.
__device__ __forceinline__ int thread_index() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}
inline constexpr int kScoreStride = kChunk + 4;

template <class Io>
inline constexpr bool kIsBf16 = __is_same(Io, __nv_bfloat16);

template <bool Bf16>
struct TileElement {
  using Type = __nv_bfloat16;
};
template <>
struct TileElement<false> {
  using Type = float;
};

template <class Io, int K>
struct PrepTraits {
  using Tile = typename TileElement<kIsBf16<Io>>::Type;
  static constexpr int kPairs = K / 2;
  static constexpr int kSegments = kPrepThreads / kPairs;
  static constexpr int kTokens = kChunk / kSegments;  ///< of a thread
  // Rows 16 bytes apart modulo 128 (32 for fp32): fragment reads touch all banks.
  static constexpr int kStride = K + 8;
  static_assert(sizeof(Io) == 2 && (K == 64 || K == 128));
};

/// q, k as loaded; bf16 tiles replace them in place.
template <class Io, int K, bool Bf16 = kIsBf16<Io>>
struct PrepTiles {
  static constexpr int kStride = PrepTraits<Io, K>::kStride;
  alignas(16) Io q[kChunk][kStride];
  alignas(16) Io k[kChunk][kStride];
  __device__ Io (&raw_q())[kChunk][kStride] { return q; }
  __device__ Io (&raw_k())[kChunk][kStride] { return k; }
};
template <class Io, int K>
struct PrepTiles<Io, K, false> {
  static constexpr int kStride = PrepTraits<Io, K>::kStride;
  alignas(16) float q[kChunk][kStride];
  alignas(16) float k[kChunk][kStride];
  alignas(16) Io loaded_q[kChunk][kStride];
  alignas(16) Io loaded_k[kChunk][kStride];
  __device__ Io (&raw_q())[kChunk][kStride] { return loaded_q; }
  __device__ Io (&raw_k())[kChunk][kStride] { return loaded_k; }
};

template <class Io, int K>
struct PrepShared {
  using Traits = PrepTraits<Io, K>;
  using Tile = typename Traits::Tile;
  PrepTiles<Io, K> rows;
  union {
    struct {
      alignas(16) Tile down[kChunk][Traits::kStride];
      alignas(16) Tile cross[kBlock][Traits::kStride];
    };
    struct {
      alignas(16) float scores[kChunk][kScoreStride];
      alignas(16) float L[kChunk][kScoreStride];
    };
  };
  float totals[Traits::kSegments][K];  ///< sums of the segments' decays
  float firsts[Traits::kSegments][K];  ///< their first ones
  float rq[kChunk];
  float rk[kChunk];
  float beta[kChunk];

  /// G of rows that are far, over the tiles that scores no longer need.
  __device__ float (&G())[kChunk][Traits::kStride] {
    static_assert(sizeof(rows) >= sizeof(float) * kChunk * Traits::kStride);
    return reinterpret_cast<float(&)[kChunk][Traits::kStride]>(rows);
  }
};

/// A column pair of a row in shared memory.
template <class Io>
__device__ __forceinline__ float2 pair_at(const Io* row, int column) {
  return unpack<Io>(*reinterpret_cast<const uint32_t*>(row + column));
}
__device__ __forceinline__ float2 pair_at(const float* row, int column) {
  return *reinterpret_cast<const float2*>(row + column);
}

__device__ __forceinline__ float2 exp2_pair(float2 x) { return {exp2_of(x.x), exp2_of(x.y)}; }
__device__ __forceinline__ float2 operator-(float2 x, float2 y) { return {x.x - y.x, x.y - y.y}; }
__device__ __forceinline__ float2 operator*(float2 x, float2 y) { return {x.x * y.x, x.y * y.y}; }
__device__ __forceinline__ float2 operator*(float2 x, float y) { return {x.x * y, x.y * y}; }

/// d += a b in tf32: rows (upper, lower), column pair each, times `b`.
__device__ __forceinline__ void add_step(float (&d)[4], float2 upper, float2 lower, float2 b) {
  const uint32_t a[4] = {tf32_of(upper.x), tf32_of(lower.x), tf32_of(upper.y), tf32_of(lower.y)};
  const uint32_t column[2] = {tf32_of(b.x), tf32_of(b.y)};
  mma_tf32(d, a, column);
}

/// x += rows[row0 ..] columns[column0 ..]^T, 16 x 16: [columns 0..7 or 8..15][fragment].
template <int K, int Stride>
__device__ __forceinline__ void add_block(float (&x)[2][4], const __nv_bfloat16 (*rows)[Stride],
                                          const __nv_bfloat16 (*columns)[Stride]) {
  const int lane = thread_index() % 32;
  const auto a = static_cast<uint32_t>(__cvta_generic_to_shared(&rows[lane % 16][lane / 16 * 8]));
  const auto b = static_cast<uint32_t>(
      __cvta_generic_to_shared(&columns[lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8]));
#pragma unroll
  for (int step = 0; step < K / 16; ++step) {
    uint32_t row[4];
    uint32_t column[4];
    ldmatrix(row, a + 32 * step);
    ldmatrix(column, b + 32 * step);
    mma_bf16(x[0], row, column);
    mma_bf16(x[1], row, column + 2);
  }
}

/// The same in tf32. Lanes take the columns in pairs: the sum does not care for their order.
template <int K, int Stride>
__device__ __forceinline__ void add_block(float (&x)[2][4], const float (*rows)[Stride],
                                          const float (*columns)[Stride]) {
  const int lane = thread_index() % 32;
#pragma unroll 4
  for (int step = 0; step < K / 8; ++step) {
    const int c = 8 * step + 2 * (lane % 4);
    const float2 upper = pair_at(rows[lane / 4], c);
    const float2 lower = pair_at(rows[lane / 4 + 8], c);
    add_step(x[0], upper, lower, pair_at(columns[lane / 4], c));
    add_step(x[1], upper, lower, pair_at(columns[lane / 4 + 8], c));
  }
}

/// A block's accumulators to `scores` (diagonal kept) or `L` (beta applied, diagonal left out).
template <class Io, int K>
__device__ __forceinline__ void put_scores(PrepShared<Io, K>& shared, const float (&x)[2][4],
                                           bool is_L, int row0, int column0) {
  const int lane = thread_index() % 32;
#pragma unroll
  for (int e = 0; e < 8; e += 2) {
    const int i = row0 + lane / 4 + e % 4 / 2 * 8;
    const int j = column0 + e / 4 * 8 + lane % 4 * 2;
    const float left = x[e / 4][e % 4];
    const float right = x[e / 4][e % 4 + 1];
    if (is_L) {
      const float beta = shared.beta[i];
      *reinterpret_cast<float2*>(&shared.L[i][j]) = {j < i ? left * beta : 0,
                                                     j + 1 < i ? right * beta : 0};
    } else {
      *reinterpret_cast<float2*>(&shared.scores[i][j]) = {j <= i ? left : 0,
                                                          j + 1 <= i ? right : 0};
    }
  }
}

/// Phase 4: warps 0, 1 the diagonal blocks of q k^T and k k^T, warps 2, 3 the block below of each.
template <class Io, int K>
__device__ __forceinline__ void compute_scores(PrepShared<Io, K>& shared) {
  const int warp = thread_index() / 32;
  const int row0 = warp == 0 ? 0 : kBlock;
  float q[2][4] = {};
  float k[2][4] = {};
  if (warp < 2) {
    add_block<K>(q, shared.rows.q + row0, shared.down + row0);
    add_block<K>(k, shared.rows.k + row0, shared.down + row0);
  } else if (warp == 2) {
    add_block<K>(q, shared.rows.q + row0, shared.cross);
  } else {
    add_block<K>(k, shared.rows.k + row0, shared.cross);
  }
  __syncthreads();  // the tiles have been read
  const int column0 = warp < 2 ? row0 : 0;
  if (warp != 3) put_scores(shared, q, false, row0, column0);
  if (warp != 2) put_scores(shared, k, true, row0, column0);
}

/// Entries (row, column) of q k^T and k k^T as exact pairwise sums, in every lane.
template <class Io, int K>
__device__ float2 pair_scores(PrepShared<Io, K>& shared, const Io* q, const Io* k, const Io* column,
                              int i, int j) {
  float2 sum{0, 0};
  for (int c = 2 * (thread_index() % 32); c < K; c += 64) {
    const float2 decay = exp2_pair(pair_at(shared.G()[i], c) - pair_at(shared.G()[j], c));
    const float2 y = pair_at(column, c) * decay;
    const float2 x = pair_at(q, c) * y;
    const float2 z = pair_at(k, c) * y;
    sum.x += x.x + x.y;
    sum.y += z.x + z.y;
  }
  for (int step = 16; step > 0; step /= 2) {
    sum.x += __shfl_xor_sync(~0u, sum.x, step);
    sum.y += __shfl_xor_sync(~0u, sum.y, step);
  }
  return {sum.x * shared.rq[i] * shared.rk[j], sum.y * shared.rk[i] * shared.rk[j]};
}

/// Rows whose factor in their diagonal block is beyond kFarRow, one warp a row; of those that do
/// not exist 0 times that factor. q, k: the chunk's first rows in memory.
template <class Io, int K>
__device__ void replace_far_rows(PrepShared<Io, K>& shared, const Io* q, int64_t q_stride,
                                 const Io* k, int64_t k_stride, int rows) {
  const int lane = thread_index() % 32;
  for (int i = thread_index() / 32; i < kChunk; i += kPrepThreads / 32) {
    const int first = i / kBlock * kBlock;
    bool far = false;
    for (int c = lane; c < K; c += 32) {
      far = far || shared.G()[first][c] - shared.G()[i][c] > kFarRow;
    }
    if (!__any_sync(~0u, far)) continue;
    for (int j = first; j <= i; ++j) {
      float2 entry{0, 0};
      if (i < rows) {
        entry = pair_scores(shared, q + i * q_stride, k + i * k_stride, k + j * k_stride, i, j);
      }
      if (lane != 0) continue;
      shared.scores[i][j] = entry.x;
      if (j < i) shared.L[i][j] = entry.y * shared.beta[i];
    }
  }
}

/// Inverts the two diagonal blocks of I + L by fp32 forward substitution, which has no range to
/// exceed, and leaves them in L. Lane j owns column j % 16 of block j / 16.
__device__ __forceinline__ void invert_blocks(float (&L)[kChunk][kScoreStride]) {
  const int lane = thread_index() % 32;
  const int first = lane / 16 * 16;
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float sum[2] = {};
#pragma unroll
    for (int m = 0; m < i; ++m) sum[m % 2] = fmaf(L[first + i][first + m], x[m], sum[m % 2]);
    x[i] = (i == lane % 16 ? 1.f : 0.f) - (sum[0] + sum[1]);
    if (i < lane % 16) x[i] = 0;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16; ++i) L[first + i][lane] = x[i];
  __syncwarp();
}

/// d = a b for 16 x 16 blocks; A(i, c): the column pair c of row i, B(c, j): rows c, c + 1.
template <class A, class B>
__device__ __forceinline__ void multiply_blocks(float (&d)[2][4], A a, B b) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 upper = a(step, 0);
      const float2 lower = a(step, 1);
      add_step(d[n], upper, lower, b(step, n));
    }
  }
}

/// (I + L)^-1, with diag(beta) unless that is split: the block below the diagonal is -T22 L21 T11.
template <class Io, int K>
__device__ __forceinline__ void write_solve(PrepShared<Io, K>& shared, std::byte* record,
                                            bool split_beta) {
  auto& L = shared.L;
  invert_blocks(L);
  const int lane = thread_index() % 32;
  if (split_beta) {
    reinterpret_cast<float*>(record + Record<K>::kBeta)[lane] = shared.beta[lane];
  }
  const int g = lane / 4;
  const int c = 2 * (lane % 4);
  float z[2][4] = {};
  multiply_blocks(
      z, [&](int step, int half) { return pair_at(L[16 + 8 * half + g], 16 + 8 * step + c); },
      [&](int step, int n) -> float2 {
        return {L[16 + 8 * step + c][8 * n + g], L[17 + 8 * step + c][8 * n + g]};
      });
  float x[2][4] = {};
  multiply_blocks(
      x,
      [&](int step, int half) -> float2 {
        return {z[step][2 * half], z[step][2 * half + 1]};
      },
      [&](int step, int n) -> float2 {
        return {L[8 * step + c][8 * n + g], L[8 * step + c + 1][8 * n + g]};
      });
  std::byte* const solve = record + Record<K>::kSolve;
#pragma unroll
  for (int e = 0; e < 16; ++e) {  // 16 fragments of 8 rows x 8 columns
    const int row = e / 4 * 8 + g;
    const int column = e % 4 * 8 + c;
    const float2 beta = split_beta ? float2{1, 1} : pair_at(shared.beta, column);
    float2 y{0, 0};
    if (e / 8 == e % 4 / 2) {
      y = pair_at(L[row], column);
    } else if (e >= 8) {
      const float* const block = x[e % 4] + e / 4 % 2 * 2;
      y = {-block[0], -block[1]};
    }
    *reinterpret_cast<uint32_t*>(solve + square_offset(row, column)) =
        pack<Io>(y.x * beta.x, y.y * beta.y);
  }
}

template <class Io, int K>
__device__ __forceinline__ void write_scores(const PrepShared<Io, K>& shared, std::byte* record) {
  for (int pair = thread_index() - 32; pair < kChunk * kChunk / 2; pair += 96) {
    const int i = pair / (kChunk / 2);
    const int j = pair % (kChunk / 2) * 2;
    const bool above = i < kBlock && j >= kBlock;  // never computed
    const float2 x = above ? float2{0, 0} : pair_at(shared.scores[i], j);
    *reinterpret_cast<uint32_t*>(record + Record<K>::kScores + square_offset(i, j)) =
        pack<Io>(x.x, x.y);
  }
}

}  // namespace kda::cuda::sm90
