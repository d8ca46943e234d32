// prep: raw q, k, g, beta of one chunk of 32 tokens and one value head -> its record (config.h).
//
// Grid: one block of 128 threads for each (chunk, value head), heads fastest, so that blocks that
// run together read neighbouring heads of the same tokens.
//
// Phases (a barrier between them):
//   1 load    q, k into shared memory (cp.async); g, beta into registers
//   2 decay   thread = a column pair and 32 / kSegments consecutive tokens: gate, running sum G in
//             log2; row norms of q and k, 8 lanes a row; sums of the segments through `totals`
//   3 tiles   the same threads: k 2^G, q 2^G, k 2^(G_end - G) to the record; G to shared memory
//   4 scores  warps 0, 1: diagonal 16 x 16 blocks of q k^T and k k^T; warps 2, 3: the block below
//             the diagonal of q k^T (2) and k k^T (3). tf32 products whose operands are scaled in
//             registers; results go where G was
//   5 solve   warp 0: (I + L)^-1, 16 x 16 blocks by forward substitution, lane = column;
//             warps 1..3: scores to the record
//
// Every factor but one is 2^x with x <= 0. The exception are the columns of a diagonal block, which
// refer to the first row of their 8 columns: 2^(G_first - G_j). A column where that exceeds
// 2^kFarColumn is computed pair by pair instead (replace_column). Row i never depends on a later
// token, not even through rounding: o of a prefix is bit for bit the same whatever follows.
//
// Shared memory, K = 128: q, k 2 x 8704; G (later scores, L) 17408; totals 1024; norms, beta 384
// = 36224 bytes.
#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mma_sync.cuh"
#include "cuda/sm90/chunk_fwd/chunk_fwd.h"
#include "cuda/sm90/chunk_fwd/config.h"
#include "cuda/tile/fast_gate.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/sequence.cuh"

namespace kda::cuda::sm90 {

inline constexpr float kFarColumn = 100;
inline constexpr int kScoreStride = kChunk + 4;

inline constexpr int32_t kBFloat16 = 1;  ///< values of kda::DType
inline constexpr int32_t kFloat16 = 2;

/// chunk_of for a grid's worth of chunks, without 64-bit division.
__device__ __forceinline__ Chunk small_chunk_of(const Sequences& s, uint32_t row) {
  if (s.cu.data) return chunk_of(s, row);
  const auto per_row = static_cast<uint32_t>(s.chunks_per_row);
  const uint32_t batch = row / per_row;
  const int64_t begin = int64_t{row - batch * per_row} * kChunk;
  const int64_t rest = s.T - begin;
  return {batch, begin, static_cast<int32_t>(rest < kChunk ? rest : kChunk)};
}

template <class Io, int K>
struct PrepTraits {
  static constexpr int kPairs = K / 2;
  static constexpr int kSegments = kPrepThreads / kPairs;
  static constexpr int kTokens = kChunk / kSegments;  ///< of a thread
  // Rows 16 bytes (q, k) and 32 bytes (G) apart modulo 128: fragment reads touch all banks.
  static constexpr int kStride = K + 8;
  static_assert(sizeof(Io) == 2 && (K == 64 || K == 128));
};

template <class Io, int K>
struct PrepShared {
  using Traits = PrepTraits<Io, K>;
  alignas(16) Io q[kChunk][Traits::kStride];
  alignas(16) Io k[kChunk][Traits::kStride];
  union {
    alignas(16) float G[kChunk][Traits::kStride];
    struct {
      alignas(16) float scores[kChunk][kScoreStride];
      alignas(16) float L[kChunk][kScoreStride];
    };
  };
  float totals[Traits::kSegments][K];
  float rq[kChunk];
  float rk[kChunk];
  float beta[kChunk];
};

/// A column pair of a row in shared memory.
template <class Io>
__device__ __forceinline__ float2 pair_at(const Io* row, int column) {
  return unpack<Io>(*reinterpret_cast<const uint32_t*>(row + column));
}
__device__ __forceinline__ float2 pair_at(const float* row, int column) {
  return *reinterpret_cast<const float2*>(row + column);
}

/// Rows of q or k into shared memory; zeros from `rows` on.
template <class Io, int K, int Stride>
__device__ __forceinline__ void load_rows(Io (&shared)[kChunk][Stride], const Tensor& t,
                                          const Chunk& chunk, int64_t head) {
  constexpr int kPieces = K / 8;
  const Io* data = static_cast<const Io*>(t.data) + token_offset(t, chunk.batch, chunk.begin, head);
#pragma unroll
  for (int piece = static_cast<int>(threadIdx.x); piece < kChunk * kPieces; piece += kPrepThreads) {
    const int row = piece / kPieces;
    const int column = piece % kPieces * 8;
    if (row < chunk.rows) {
      copy_async_16(&shared[row][column], data + row * t.stride[1] + column);
    } else {
      *reinterpret_cast<uint4*>(&shared[row][column]) = uint4{};
    }
  }
}

/// Two neighbouring elements, aligned together.
__device__ __forceinline__ float2 load_pair(const __nv_bfloat16* p) {
  return unpack<__nv_bfloat16>(*reinterpret_cast<const uint32_t*>(p));
}
__device__ __forceinline__ float2 load_pair(const __half* p) {
  return unpack<__half>(*reinterpret_cast<const uint32_t*>(p));
}
__device__ __forceinline__ float2 load_pair(const float* p) {
  return *reinterpret_cast<const float2*>(p);
}

/// Column pairs of g for this thread's tokens, as they are in memory; 0 beyond the last row.
template <int TOKENS>
__device__ __forceinline__ void load_gates(float2 (&z)[TOKENS], const Tensor& g, const Chunk& chunk,
                                           int64_t hv, int first, int column) {
  const auto load_as = [&]<class T>(const T* data) {
    data += token_offset(g, chunk.batch, chunk.begin + first, hv) + column;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      z[t] = first + t < chunk.rows ? load_pair(data) : float2{0, 0};
      data += g.stride[1];
    }
  };
  if (g.dtype == kBFloat16) {
    load_as(static_cast<const __nv_bfloat16*>(g.data));
  } else if (g.dtype == kFloat16) {
    load_as(static_cast<const __half*>(g.data));
  } else {
    load_as(static_cast<const float*>(g.data));
  }
}

/// x[t] = sum of decay(x[0..t]) over the rows that exist.
template <int TOKENS, class Decay>
__device__ __forceinline__ void sum_rows(float2 (&x)[TOKENS], int rows, Decay decay) {
  float2 sum{0, 0};
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    const float2 d = decay(x[t]);
    if (t < rows) sum = {sum.x + d.x, sum.y + d.y};
    x[t] = sum;
  }
}

/// Raw gates -> the running sum of log2 decays over this thread's tokens, of which `rows` exist.
template <int TOKENS>
__device__ __forceinline__ void sum_gates(float2 (&G)[TOKENS], const GateParams& params, int64_t hv,
                                          int rows, int column) {
  if (params.kind == kGateNone) {
    sum_rows(G, rows, [](float2 z) -> float2 { return {fast_no_gate(z.x), fast_no_gate(z.y)}; });
    return;
  }
  const FastGate gate = fast_gate_of(params, hv);
  const auto sum = [&](auto value) {
    const float x = bias_of(params, hv, column);
    const float y = bias_of(params, hv, column + 1);
    sum_rows(G, rows, [&](float2 z) -> float2 {
      return {value(gate, z.x + x), value(gate, z.y + y)};
    });
  };
  if (params.kind == kGateSoftplus) {
    gate.far ? sum(FarSoftplusGate{}) : sum(FastSoftplusGate{});
  } else {
    gate.far ? sum(FarBoundedGate{}) : sum(FastBoundedGate{});
  }
}

/// 1 / |row| of q and k: 8 lanes a row.
template <class Io, int K>
__device__ __forceinline__ void norm_rows(PrepShared<Io, K>& shared, bool wanted) {
  const int lane = static_cast<int>(threadIdx.x) % 8;
#pragma unroll
  for (int pass = 0; pass < 2 * kChunk * 8 / kPrepThreads; ++pass) {
    const int row = pass * kPrepThreads / 8 + static_cast<int>(threadIdx.x) / 8;
    const Io* data = row < kChunk ? shared.q[row] : shared.k[row - kChunk];
    float r = 1;
    if (wanted) {
      float sum = 0;
#pragma unroll
      for (int piece = 0; piece < K / 64; ++piece) {
        const uint4 x = *reinterpret_cast<const uint4*>(data + 64 * piece + 8 * lane);
        for (const uint32_t pair : {x.x, x.y, x.z, x.w}) {
          const float2 v = unpack<Io>(pair);
          sum = fmaf(v.x, v.x, fmaf(v.y, v.y, sum));
        }
      }
      for (int step = 4; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      r = 1 / sqrtf(sum + 1e-6f);
    }
    if (lane == 0) (row < kChunk ? shared.rq[row] : shared.rk[row - kChunk]) = r;
  }
}

__device__ __forceinline__ void load_beta(float* beta, const PrepParams& p, const Chunk& chunk,
                                          int64_t hv) {
  const int row = static_cast<int>(threadIdx.x);
  if (row >= kChunk) return;
  float x = 0;
  if (row < chunk.rows) {
    x = load<float>(p.beta, token_offset(p.beta, chunk.batch, chunk.begin + row, hv));
    if (p.beta_sigmoid) x = p.beta_factor * sigmoid(x);
  }
  beta[row] = x;
}

/// Phase 3 for one thread.
template <class Io, int K>
__device__ __forceinline__ void write_tiles(PrepShared<Io, K>& shared, std::byte* record,
                                            const float2 (&G)[PrepTraits<Io, K>::kTokens],
                                            float2 end, int first, int column) {
  using R = Record<K>;
  const int panel = column / 64;
  const int piece = column % 64 / 8;
  const int within = column % 8 * 2;
#pragma unroll
  for (int t = 0; t < PrepTraits<Io, K>::kTokens; ++t) {
    const int row = first + t;
    *reinterpret_cast<float2*>(&shared.G[row][column]) = G[t];
    float2 q = pair_at(shared.q[row], column);
    float2 k = pair_at(shared.k[row], column);
    const float rq = shared.rq[row];
    const float rk = shared.rk[row];
    q = {q.x * rq, q.y * rq};
    k = {k.x * rk, k.y * rk};
    const float2 E{exp2_of(G[t].x), exp2_of(G[t].y)};
    const float2 D{exp2_of(end.x - G[t].x), exp2_of(end.y - G[t].y)};
    const int swizzled = row * 128 + ((piece ^ row % 8) << 4) + within;
    std::byte* const read = record + R::kRead + panel * 8192 + swizzled;
    std::byte* const update = record + R::kUpdate + panel * 4096 + swizzled;
    *reinterpret_cast<uint32_t*>(read) = pack<Io>(k.x * E.x, k.y * E.y);
    *reinterpret_cast<uint32_t*>(read + 4096) = pack<Io>(q.x * E.x, q.y * E.y);
    *reinterpret_cast<uint32_t*>(update) = pack<Io>(k.x * D.x, k.y * D.y);
  }
}

/// Whether 8 rows of a column decay beyond kFarColumn: decays only add up.
template <int TOKENS>
__device__ __forceinline__ bool has_far_gate(const float2 (&G)[TOKENS]) {
  bool far = false;
#pragma unroll
  for (int t = 0; t < TOKENS; t += 8) {
    far = far || G[t].x - G[t + 7].x > kFarColumn || G[t].y - G[t + 7].y > kFarColumn;
  }
  return far;
}

/// Operands of one m16n8k8 step: rows g and g + 8, two columns of K each.
struct RowPair {
  float2 upper;
  float2 lower;
};

template <class Row>
__device__ __forceinline__ RowPair rows_at(const Row* upper, const Row* lower, int column) {
  return {pair_at(upper, column), pair_at(lower, column)};
}

__device__ __forceinline__ float2 exp2_pair(float2 x) { return {exp2_of(x.x), exp2_of(x.y)}; }
__device__ __forceinline__ float2 operator-(float2 x, float2 y) { return {x.x - y.x, x.y - y.y}; }
__device__ __forceinline__ float2 operator*(float2 x, float2 y) { return {x.x * y.x, x.y * y.y}; }

/// The tf32 operand. The tensor core drops the bits below; for bf16 results the bias of 2^-11 is
/// below what they resolve, fp16 needs the rounding.
template <class Io>
__device__ __forceinline__ uint32_t operand(float x) {
  return sizeof(Io) == 2 && __is_same(Io, __nv_bfloat16) ? __float_as_uint(x) : tf32_of(x);
}

/// d += rows (upper, lower) times columns `b`.
template <class Io>
__device__ __forceinline__ void add_step(float (&d)[4], float2 upper, float2 lower, float2 b) {
  const uint32_t a[4] = {operand<Io>(upper.x), operand<Io>(lower.x), operand<Io>(upper.y),
                         operand<Io>(lower.y)};
  const uint32_t column[2] = {operand<Io>(b.x), operand<Io>(b.y)};
  mma_tf32(d, a, column);
}

/// Accumulators of a warp: [matrix q k^T or k k^T][columns 0..7 or 8..15], fragment as mma_tf32.
struct ScoreBlock {
  float x[2][2][4] = {};
};

/// Entry (row, column) of q k^T and k k^T as the exact pairwise sum, in every lane.
template <class Io, int K>
__device__ __forceinline__ float2 far_pair(const PrepShared<Io, K>& shared, int row, int column) {
  float2 sum{0, 0};
  for (int c = 2 * (static_cast<int>(threadIdx.x) % 32); c < K; c += 64) {
    const float2 decay = exp2_pair(pair_at(shared.G[row], c) - pair_at(shared.G[column], c));
    const float2 y = pair_at(shared.k[column], c) * decay;
    const float2 q = pair_at(shared.q[row], c);
    const float2 k = pair_at(shared.k[row], c);
    sum.x += fmaf(q.x, y.x, q.y * y.y);
    sum.y += fmaf(k.x, y.x, k.y * y.y);
  }
  for (int step = 16; step > 0; step /= 2) {
    sum.x += __shfl_xor_sync(~0u, sum.x, step);
    sum.y += __shfl_xor_sync(~0u, sum.y, step);
  }
  return sum;
}

/// Replaces column `column` (0..15) of a diagonal block whose first row is `first`.
template <class Io, int K>
__device__ __forceinline__ void replace_column(ScoreBlock& block, const PrepShared<Io, K>& shared,
                                               int first, int column) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int row = column; row < 16; ++row) {
    const float2 entry = far_pair(shared, first + row, first + column);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int own_row = lane / 4 + e % 4 / 2 * 8;
      const int own_column = e / 4 * 8 + lane % 4 * 2 + e % 2;
      if (row == own_row && column == own_column) {
        block.x[0][e / 4][e % 4] = entry.x;
        block.x[1][e / 4][e % 4] = entry.y;
      }
    }
  }
}

/// Columns of the diagonal block at `first` (bit j: column j) that are beyond kFarColumn.
template <class Io, int K>
__device__ __forceinline__ uint32_t far_columns(const PrepShared<Io, K>& shared, int first) {
  uint32_t far = 0;
  for (int column = 1; column < 16; ++column) {
    bool here = false;
    for (int c = static_cast<int>(threadIdx.x) % 32; c < K; c += 32) {
      const float reference = shared.G[first + column / 8 * 8][c];
      here = here || reference - shared.G[first + column][c] > kFarColumn;
    }
    far |= __any_sync(~0u, here) ? 1u << column : 0u;
  }
  return far;
}

/// The 16 x 16 block at (first, first). Columns refer to row `first` (0..7) or `first` + 8.
template <class Io, int K>
__device__ __forceinline__ void diagonal_scores(ScoreBlock& block, const PrepShared<Io, K>& shared,
                                                int first, bool has_far) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int upper = first + lane / 4;
  const int lower = upper + 8;
#pragma unroll 4
  for (int step = 0; step < K / 8; ++step) {
    const int c = 8 * step + 2 * (lane % 4);
    const RowPair G = rows_at(shared.G[upper], shared.G[lower], c);
    const RowPair q = rows_at(shared.q[upper], shared.q[lower], c);
    const RowPair k = rows_at(shared.k[upper], shared.k[lower], c);
    const float2 ref0 = pair_at(shared.G[first], c);
    const float2 ref1 = pair_at(shared.G[first + 8], c);
    const float2 up = G.upper - ref0;
    const float2 low = G.lower - ref1;
    const float2 E_upper = exp2_pair(up);
    const float2 E_lower = exp2_pair(G.lower - ref0);
    const float2 E_own = exp2_pair(low);
    const float2 b0 = k.upper * exp2_pair({-up.x, -up.y});
    const float2 b1 = k.lower * exp2_pair({-low.x, -low.y});
    add_step<Io>(block.x[0][0], q.upper * E_upper, q.lower * E_lower, b0);
    add_step<Io>(block.x[1][0], k.upper * E_upper, k.lower * E_lower, b0);
    add_step<Io>(block.x[0][1], {0, 0}, q.lower * E_own, b1);
    add_step<Io>(block.x[1][1], {0, 0}, k.lower * E_own, b1);
  }
  if (!has_far) return;
  const uint32_t far = far_columns(shared, first);
  for (int column = 1; column < 16; ++column) {
    if ((far >> column & 1) != 0) replace_column(block, shared, first, column);
  }
}

/// Rows 16..31, columns 0..15 of q k^T or k k^T: both sides refer to row 15.
template <class Io, int K, int Stride>
__device__ __forceinline__ void cross_scores(float (&x)[2][4], const PrepShared<Io, K>& shared,
                                             const Io (&rows)[kChunk][Stride]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int upper = lane / 4;
#pragma unroll 4
  for (int step = 0; step < K / 8; ++step) {
    const int c = 8 * step + 2 * (lane % 4);
    const float2 ref = pair_at(shared.G[15], c);
    const RowPair row_G = rows_at(shared.G[upper + 16], shared.G[upper + 24], c);
    const RowPair column_G = rows_at(shared.G[upper], shared.G[upper + 8], c);
    const RowPair row = rows_at(rows[upper + 16], rows[upper + 24], c);
    const RowPair column = rows_at(shared.k[upper], shared.k[upper + 8], c);
    const float2 a0 = row.upper * exp2_pair(row_G.upper - ref);
    const float2 a1 = row.lower * exp2_pair(row_G.lower - ref);
    add_step<Io>(x[0], a0, a1, column.upper * exp2_pair(ref - column_G.upper));
    add_step<Io>(x[1], a0, a1, column.lower * exp2_pair(ref - column_G.lower));
  }
}

/// A block's accumulators to `scores` (diagonal kept) or `L` (beta applied, diagonal left out).
template <class Io, int K>
__device__ __forceinline__ void put_scores(PrepShared<Io, K>& shared, const float (&x)[2][4],
                                           bool is_L, int row0, int column0) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const int i = row0 + lane / 4 + e % 4 / 2 * 8;
    const int j = column0 + e / 4 * 8 + lane % 4 * 2 + e % 2;
    const float value = x[e / 4][e % 4] * shared.rk[j];
    if (is_L) {
      shared.L[i][j] = j < i ? value * shared.rk[i] * shared.beta[i] : 0;
    } else {
      shared.scores[i][j] = j <= i ? value * shared.rq[i] : 0;
    }
  }
}

/// Phases 4 and the writes that follow it.
template <class Io, int K>
__device__ __forceinline__ void compute_scores(PrepShared<Io, K>& shared, bool has_far) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  ScoreBlock block;
  if (warp < 2) {
    diagonal_scores(block, shared, 16 * warp, has_far);
  } else if (warp == 2) {
    cross_scores(block.x[0], shared, shared.q);
  } else {
    cross_scores(block.x[1], shared, shared.k);
  }
  __syncthreads();  // G has been read
  if (warp < 2) {
    put_scores(shared, block.x[0], false, 16 * warp, 16 * warp);
    put_scores(shared, block.x[1], true, 16 * warp, 16 * warp);
  } else if (warp == 2) {
    put_scores(shared, block.x[0], false, 16, 0);
  } else {
    put_scores(shared, block.x[1], true, 16, 0);
  }
  __syncthreads();
}

/// Inverts the two diagonal blocks of I + L by fp32 forward substitution, which has no range to
/// exceed, and leaves them in L. Lane j owns column j % 16 of block j / 16.
__device__ __forceinline__ void invert_blocks(float (&L)[kChunk][kScoreStride]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
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
template <class Io, class A, class B>
__device__ __forceinline__ void multiply_blocks(float (&d)[2][4], A a, B b) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 upper = a(step, 0);
      const float2 lower = a(step, 1);
      add_step<Io>(d[n], upper, lower, b(step, n));
    }
  }
}

/// (I + L)^-1 diag(beta): the block below the diagonal is -T22 L21 T11.
template <class Io, int K>
__device__ __forceinline__ void write_solve(PrepShared<Io, K>& shared, std::byte* record) {
  auto& L = shared.L;
  invert_blocks(L);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4;
  const int c = 2 * (lane % 4);
  float z[2][4] = {};
  multiply_blocks<Io>(
      z, [&](int step, int half) { return pair_at(L[16 + 8 * half + g], 16 + 8 * step + c); },
      [&](int step, int n) -> float2 {
        return {L[16 + 8 * step + c][8 * n + g], L[17 + 8 * step + c][8 * n + g]};
      });
  float x[2][4] = {};
  multiply_blocks<Io>(
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
    const float2 beta = pair_at(shared.beta, column);
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
  for (int pair = static_cast<int>(threadIdx.x) - 32; pair < kChunk * kChunk / 2; pair += 96) {
    const int i = pair / (kChunk / 2);
    const int j = pair % (kChunk / 2) * 2;
    const bool above = i < 16 && j >= 16;  // never computed
    const float2 x = above ? float2{0, 0} : pair_at(shared.scores[i], j);
    *reinterpret_cast<uint32_t*>(record + Record<K>::kScores + square_offset(i, j)) =
        pack<Io>(x.x, x.y);
  }
}

template <class Io, int K>
__global__ void __launch_bounds__(kPrepThreads, kPrepBlocksPerSm)
    sm90_chunk_fwd_prep(const __grid_constant__ PrepParams p) {
  using Traits = PrepTraits<Io, K>;
  __shared__ PrepShared<Io, K> shared;
  const int tid = static_cast<int>(threadIdx.x);
  const int column = tid % Traits::kPairs * 2;
  const int segment = tid / Traits::kPairs;
  const int first = segment * Traits::kTokens;
  const auto HV = static_cast<uint32_t>(p.heads.HV);
  const uint32_t hv = blockIdx.x % HV;
  const uint32_t head = hv / static_cast<uint32_t>(p.heads.group);
  const Chunk chunk = small_chunk_of(p.sequences, blockIdx.x / HV);
  if (chunk.rows == 0) return;
  std::byte* const record = p.records + int64_t{blockIdx.x} * Record<K>::kBytes;
  load_rows<Io, K>(shared.q, p.q, chunk, head);
  load_rows<Io, K>(shared.k, p.k, chunk, head);
  commit_copies();
  float2 G[Traits::kTokens];
  load_gates(G, p.gate.g, chunk, hv, first, column);
  load_beta(shared.beta, p, chunk, hv);
  sum_gates(G, p.gate, hv, chunk.rows - first, column);
  *reinterpret_cast<float2*>(&shared.totals[segment][column]) = G[Traits::kTokens - 1];
  wait_for_copies<0>();
  __syncthreads();
  norm_rows(shared, p.qk_l2norm);
  float2 before{0, 0};
  float2 end{0, 0};
#pragma unroll
  for (int s = 0; s < Traits::kSegments; ++s) {
    if (s == segment) before = end;
    const float2 total = pair_at(shared.totals[s], column);
    end = {end.x + total.x, end.y + total.y};
  }
#pragma unroll
  for (int t = 0; t < Traits::kTokens; ++t) G[t] = {G[t].x + before.x, G[t].y + before.y};
  __syncthreads();
  write_tiles(shared, record, G, end, first, column);
  if (segment == 0) {
    *reinterpret_cast<float2*>(record + Record<K>::kDecay + column * 4) = exp2_pair(end);
  }
  compute_scores(shared, __syncthreads_or(has_far_gate(G)) != 0);
  if (tid < 32) {
    write_solve(shared, record);
  } else {
    write_scores(shared, record);
  }
}

}  // namespace kda::cuda::sm90
