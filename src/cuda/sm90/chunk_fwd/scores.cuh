// Scores of prep: scaled tiles in shared memory -> q k^T into the record, N = -L for the solve.
//
// Products of 16 x 16 blocks. With G' the log2 decay summed from the first token of a block of 16,
// and R = G' of the whole block 0: rows of a block are q and k times 2^G'_i; columns are k times
// 2^-G'_j in the diagonal blocks (`down`), k times 2^(R - G'_j) where block 1 reads block 0
// (`cross`). All factors are at most 1 but those of `down`, at most 2^kFarBlock. Rows beyond that
// are computed pair by pair (replace_far_rows).
//
// bf16: tiles are bf16, products m16n8k16. fp16 has not the range of 2^kFarBlock: tiles are fp32,
// products tf32.
#pragma once

#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma_sync.cuh"
#include "cuda/sm90/chunk_fwd/prep_shared.cuh"

namespace kda::cuda::sm90 {

/// d += a b in tf32: rows (upper, lower), column pair each, times `b`.
__device__ __forceinline__ void add_step(float (&d)[4], float2 upper, float2 lower, float2 b) {
  const uint32_t a[4] = {tf32_of(upper.x), tf32_of(lower.x), tf32_of(upper.y), tf32_of(lower.y)};
  const uint32_t column[2] = {tf32_of(b.x), tf32_of(b.y)};
  mma_tf32(d, a, column);
}

/// The lane's address of a 16 x 16 block for ldmatrix, as an A operand or, transposed, as a B one.
template <class T, int Stride>
__device__ __forceinline__ uint32_t row_fragment(const T (*rows)[Stride]) {
  const int lane = this_thread() % 32;
  return static_cast<uint32_t>(__cvta_generic_to_shared(&rows[lane % 16][lane / 16 * 8]));
}
template <class T, int Stride>
__device__ __forceinline__ uint32_t column_fragment(const T (*rows)[Stride]) {
  const int lane = this_thread() % 32;
  return static_cast<uint32_t>(
      __cvta_generic_to_shared(&rows[lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8]));
}

/// q += (rows of q)(columns)^T and k likewise, 16 x 16: [columns 0..7 or 8..15][fragment].
template <int K, bool HasQ, bool HasK, int Stride, int ColumnStride>
__device__ __forceinline__ void add_block(float (&q)[2][4], float (&k)[2][4],
                                          const __nv_bfloat16 (*q_rows)[Stride],
                                          const __nv_bfloat16 (*k_rows)[Stride],
                                          const __nv_bfloat16 (*columns)[ColumnStride]) {
  const uint32_t at_q = row_fragment(q_rows);
  const uint32_t at_k = row_fragment(k_rows);
  const uint32_t at_column = column_fragment(columns);
#pragma unroll
  for (int step = 0; step < K / 16; ++step) {
    uint32_t row[4];
    uint32_t column[4];
    ldmatrix(column, at_column + 32 * step);
    if constexpr (HasQ) {
      ldmatrix(row, at_q + 32 * step);
      mma_bf16(q[0], row, column);
      mma_bf16(q[1], row, column + 2);
    }
    if constexpr (HasK) {
      ldmatrix(row, at_k + 32 * step);
      mma_bf16(k[0], row, column);
      mma_bf16(k[1], row, column + 2);
    }
  }
}

/// The same in tf32. Lanes take the columns in pairs: the sum does not care for their order.
template <int K, bool HasQ, bool HasK, int Stride, int ColumnStride>
__device__ __forceinline__ void add_block(float (&q)[2][4], float (&k)[2][4],
                                          const float (*q_rows)[Stride],
                                          const float (*k_rows)[Stride],
                                          const float (*columns)[ColumnStride]) {
  const int lane = this_thread() % 32;
  const auto add = [&](float(&x)[2][4], const float(*rows)[Stride]) {
#pragma unroll 4
    for (int step = 0; step < K / 8; ++step) {
      const int c = 8 * step + 2 * (lane % 4);
      const float2 upper = pair_at(rows[lane / 4], c);
      const float2 lower = pair_at(rows[lane / 4 + 8], c);
      add_step(x[0], upper, lower, pair_at(columns[lane / 4], c));
      add_step(x[1], upper, lower, pair_at(columns[lane / 4 + 8], c));
    }
  };
  if constexpr (HasQ) add(q, q_rows);
  if constexpr (HasK) add(k, k_rows);
}

/// Where this lane's pair of the fragment of rows 8 i .. and columns 8 j .. lies in a SquareTile
/// that starts at a multiple of 64 bytes.
struct SquareFragments {
  uint64_t start;

  __device__ __forceinline__ explicit SquareFragments(uint64_t tile) {
    const int lane = this_thread() % 32;
    start = tile + static_cast<uint32_t>(square_offset(lane / 4, lane % 4 * 2));
  }
  __device__ __forceinline__ uint64_t at(int i, int j) const {
    return (start ^ static_cast<uint64_t>(j << 4)) + static_cast<uint64_t>(i * 8 * 64);
  }
};

/// A block of q k^T to the record; `diagonal`: what lies above the diagonal is zero.
template <class Io, int K>
__device__ __forceinline__ void put_scores(uint64_t record, const float (&x)[2][4], int row0,
                                           int column0, bool diagonal) {
  const int lane = this_thread() % 32;
  const SquareFragments fragments(record + Record<K>::kScores);
#pragma unroll
  for (int e = 0; e < 8; e += 2) {
    const int i = lane / 4 + e % 4 / 2 * 8;
    const int j = e / 4 * 8 + lane % 4 * 2;
    const float left = !diagonal || j <= i ? x[e / 4][e % 4] : 0;
    const float right = !diagonal || j + 1 <= i ? x[e / 4][e % 4 + 1] : 0;
    store_global(fragments.at(row0 / 8 + e % 4 / 2, column0 / 8 + e / 4),
                 Words<1>{pack<Io>(left, right)});
  }
}

/// A block of k k^T to N.
template <class Io, int K>
__device__ __forceinline__ void put_N(PrepShared<Io, K>& shared, const float* beta,
                                      const float (&x)[2][4], int row0, int column0,
                                      bool diagonal) {
  const int lane = this_thread() % 32;
#pragma unroll
  for (int e = 0; e < 8; e += 2) {
    const int i = lane / 4 + e % 4 / 2 * 8;
    const int j = e / 4 * 8 + lane % 4 * 2;
    const float factor = -beta[row0 + i];
    const float left = x[e / 4][e % 4] * factor;
    const float right = x[e / 4][e % 4 + 1] * factor;
    if (diagonal) {
      shared.N[row0 + j][row0 + i] = left;  // the solve reads below the diagonal alone
      shared.N[row0 + j + 1][row0 + i] = right;
    } else {
      *reinterpret_cast<float2*>(&shared.N[row0 + i][column0 + j]) = {left, right};
    }
  }
}

/// Warps 0, 1: the diagonal blocks of q k^T and k k^T; warps 2, 3: the block below of each, and
/// zeros above.
template <class Io, int K>
__device__ __forceinline__ void compute_scores(PrepShared<Io, K>& shared, const float* beta,
                                               uint64_t record, int warp) {
  float q[2][4] = {};
  float k[2][4] = {};
  if (warp < 2) {
    const int row0 = warp * kBlock;
    add_block<K, true, true>(q, k, shared.rows.q + row0, shared.rows.k + row0,
                             shared.down() + row0);
    put_scores<Io, K>(record, q, row0, row0, true);
    put_N(shared, beta, k, row0, row0, true);
  } else if (warp == 2) {
    add_block<K, true, false>(q, k, shared.rows.q + kBlock, shared.rows.k, shared.rows.cross());
    put_scores<Io, K>(record, q, kBlock, 0, false);
  } else {
    add_block<K, false, true>(q, k, shared.rows.q, shared.rows.k + kBlock, shared.rows.cross());
    put_N(shared, beta, k, kBlock, 0, false);
    const int lane = this_thread() % 32;
    const int offset = square_offset(lane / 2, kBlock + lane % 2 * 8);
    store_global(record + static_cast<uint32_t>(Record<K>::kScores + offset), Words<4>{});
    store_global(record + static_cast<uint32_t>(Record<K>::kSolve + offset), Words<4>{});
  }
}

/// Entries (i, j) of q k^T and k k^T as exact pairwise sums, in every lane.
template <class Io, int K>
__device__ float2 pair_scores(PrepShared<Io, K>& shared, const Io* q, const Io* k, const Io* column,
                              int i, int j) {
  float2 sum{0, 0};
  for (int c = 2 * (this_thread() % 32); c < K; c += 64) {
    const float2 decay = exp2_pair(pair_at(shared.G(i), c) - pair_at(shared.G(j), c));
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
  return {sum.x * shared.norm[i].x * shared.norm[j].y, sum.y * shared.norm[i].y * shared.norm[j].y};
}

/// Rows whose factor in their diagonal block is beyond kFarBlock, one warp a row; of those that do
/// not exist 0 times that factor. q, k: the chunk's first rows in memory.
template <class Io, int K>
__device__ void replace_far_rows(PrepShared<Io, K>& shared, const float* beta, std::byte* record,
                                 const Io* q, int64_t q_stride, const Io* k, int64_t k_stride,
                                 int rows) {
  const int lane = this_thread() % 32;
  for (int i = this_thread() / 32; i < kChunk; i += kPrepThreads / 32) {
    bool far = false;
    for (int c = lane; c < K; c += 32) far = far || shared.G(i)[c] < -kFarBlock;
    if (!__any_sync(~0u, far)) continue;
    for (int j = i / kBlock * kBlock; j <= i; ++j) {
      float2 entry{0, 0};
      if (i < rows) {
        entry = pair_scores(shared, q + i * q_stride, k + i * k_stride, k + j * k_stride, i, j);
      }
      if (lane != 0) continue;
      *reinterpret_cast<Io*>(record + Record<K>::kScores + square_offset(i, j)) =
          from_real<Io>(entry.x);
      if (j < i) shared.N[j][i] = -entry.y * beta[i];
    }
  }
}

}  // namespace kda::cuda::sm90
