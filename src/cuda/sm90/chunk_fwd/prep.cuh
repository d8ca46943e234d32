// prep: raw q, k, g, beta of chunks of 32 tokens and value heads -> their records (config.h).
//
// Grid: any number of blocks of 128 threads; each takes items (chunk, value head) in steps of the
// grid. Order: the first chunks of all sequences, their heads, then the second chunks ..., of
// packed sequences rows of the chunk table. Heads run fastest, so that blocks that run together
// read neighbouring heads of the same tokens.
//
// Warps: warp w has tokens 8 w .. 8 w + 7 and all columns, K / 32 neighbouring ones a lane. G' is
// the log2 decay summed from the first token of a block of 16.
//
// Phases of an item (| a barrier):
//   1 decay   the warp's q, k (cp.async) and g have been on their way since the item before; gates,
//             running sums; norms of its 8 rows of q and k, the diagonals of two products; totals |
//   2 tiles   k 2^G, q 2^G, k 2^(G_end - G) to the record, products of 2^G' and 2^-G' with factors
//             of whole blocks; the scaled tiles of scores.cuh to shared memory |
//   3 scores  q k^T to the record, k k^T to N (scores.cuh) |
//             loads of the next item
//   4 solve   (I + L)^-1 (solve.cuh), each warp in its turn, while the others begin the next item
//
// Row i never depends on a later token, not even through rounding: o of a prefix is bit for bit the
// same whatever follows.
//
// A scan that runs beside reads records as they are finished: `ready` (config as PrepParams says).
// A block clears the flags of its own items before it lets the next launch start, so that every
// flag that the scan sees is of this run, and every block that sets one is running or done.
//
// Shared memory, K = 128, bf16 (fp16): q, k 17408 (52224 with their fp32 tiles); down, cross 13056
// (26112); N 4608; totals 2048; norms, beta 512 = 37632 (85504) bytes.
#pragma once

#include "cuda/ptx/bulk_copy.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/sm90/chunk_fwd/solve.cuh"
#include "cuda/tile/shared_memory.cuh"

namespace kda::cuda::sm90 {

/// The item of a number, or the first one after it in the block's steps that has rows; rows == 0:
/// there is none. One thread finds it for all.
template <class Io, int K>
__device__ __forceinline__ void find_item(PrepItem& item, const PrepParams& p, uint64_t number) {
  const Sequences& s = p.sequences;
  const auto heads = static_cast<uint32_t>(p.heads.HV);
  item.rows = 0;
  for (; number < static_cast<uint64_t>(s.chunk_rows) * heads; number += gridDim.x) {
    const auto small = static_cast<uint32_t>(number);
    const PrepRow at = row_of(s, heads, small);
    const Chunk chunk = small_chunk_of(s, at.row);
    if (chunk.rows == 0) continue;
    item.number = small;
    item.rows = chunk.rows;
    item.hv = at.hv;
    item.record = at.row * heads + at.hv;
    const int64_t head = at.hv / static_cast<uint32_t>(p.heads.group);
    item.q = token_offset(p.q, chunk.batch, chunk.begin, head);
    item.k = token_offset(p.k, chunk.batch, chunk.begin, head);
    item.g = token_offset(p.gate.g, chunk.batch, chunk.begin, at.hv);
    item.beta = token_offset(p.beta, chunk.batch, chunk.begin, at.hv);
    return;
  }
}

/// Clears the flags of this block's items and lets the next launch start.
__device__ __forceinline__ void clear_ready(const PrepParams& p) {
  const auto heads = static_cast<uint32_t>(p.heads.HV);
  const uint64_t count = static_cast<uint64_t>(p.sequences.chunk_rows) * heads;
  for (uint64_t number = blockIdx.x + uint64_t{threadIdx.x} * gridDim.x; number < count;
       number += uint64_t{kPrepThreads} * gridDim.x) {
    const PrepRow at = row_of(p.sequences, heads, static_cast<uint32_t>(number));
    p.ready[at.row * heads + at.hv] = 0;
  }
  __threadfence();
  __syncthreads();
  cudaTriggerProgrammaticLaunchCompletion();
}

/// The warp's rows of q or k into shared memory; zeros beyond the chunk's last row.
template <class Io, int K, int Stride>
__device__ __forceinline__ void load_rows(Io (&shared)[kChunk][Stride], const Tensor& t,
                                          int64_t offset, int rows, int first) {
  constexpr int kPieces = K / 8;
  constexpr int kRowsAtOnce = 32 / kPieces;
  const int lane = this_thread() % 32;
  const int row = first + lane / kPieces;
  const int column = lane % kPieces * 8;
  const Io* data = static_cast<const Io*>(t.data) + offset + row * t.stride[1] + column;
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(&shared[row][column]));
#pragma unroll
  for (int i = 0; i < PrepTraits<Io, K>::kTokens; i += kRowsAtOnce) {
    const bool valid = row + i < rows;
    copy_async_16_or_zero(to + i * Stride * sizeof(Io), valid ? data : t.data, valid);
    data += kRowsAtOnce * t.stride[1];
  }
}

/// 1 / |row| of the warp's rows of q and k: the diagonals of q q^T and k k^T.
template <class Io, int K>
__device__ __forceinline__ void norm_rows(PrepShared<Io, K>& shared, bool wanted, int first) {
  const int lane = this_thread() % 32;
  const int g = lane / 4;
  float2 norm{1, 1};
  if (wanted) {
    float q[4] = {};
    float k[4] = {};
    const Io(&raw)[kChunk][PrepTraits<Io, K>::kStride] =
        lane / 8 % 2 == 0 ? shared.rows.raw_q() : shared.rows.raw_k();
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

__device__ __forceinline__ void load_beta(float* beta, const PrepParams& p, const PrepItem& item,
                                          int row) {
  float x = 0;
  if (row < item.rows) {
    x = load<float>(p.beta, item.beta + row * p.beta.stride[1]);
    if (p.beta_sigmoid) x = p.beta_factor * sigmoid(x);
  }
  beta[row] = x;
}

/// log2 decay of a whole block in this lane's columns.
template <class Io, int K>
__device__ __forceinline__ void sum_block(float2 (&total)[K / 64], const PrepShared<Io, K>& shared,
                                          int block, int column) {
#pragma unroll
  for (int i = 0; i < K / 64; ++i) {
    total[i] = pair_at(shared.totals[2 * block], column + 2 * i) +
               pair_at(shared.totals[2 * block + 1], column + 2 * i);
  }
}

template <int PAIRS>
__device__ __forceinline__ bool any_far(const float2 (&total)[PAIRS]) {
  bool far = false;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    far = far || total[i].x < -kFarBlock || total[i].y < -kFarBlock;
  }
  return __any_sync(~0u, far) != 0;
}

/// Running sums of the second warp of a block go on from those of the first.
template <class Io, int K>
__device__ __forceinline__ void add_before(float2 (&G)[K / 64][8], const PrepShared<Io, K>& shared,
                                           int warp, int column) {
  if (warp % 2 == 0) return;
#pragma unroll
  for (int i = 0; i < K / 64; ++i) {
    const float2 before = pair_at(shared.totals[warp - 1], column + 2 * i);
#pragma unroll
    for (float2& x : G[i]) x = x + before;
  }
}

template <class T16, int PAIRS>
__device__ __forceinline__ Words<PAIRS> pack_pairs(const float2 (&x)[PAIRS]) {
  Words<PAIRS> words;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) words.word[i] = pack<T16>(x[i].x, x[i].y);
  return words;
}
template <int PAIRS>
__device__ __forceinline__ void put_pairs(__nv_bfloat16* to, const float2 (&x)[PAIRS]) {
  *reinterpret_cast<Words<PAIRS>*>(to) = pack_pairs<__nv_bfloat16>(x);
}
template <int PAIRS>
__device__ __forceinline__ void put_pairs(float* to, const float2 (&x)[PAIRS]) {
  struct alignas(8 * PAIRS) Pairs {
    float2 pair[PAIRS];
  };
  Pairs pairs;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) pairs.pair[i] = x[i];
  *reinterpret_cast<Pairs*>(to) = pairs;
}
template <class Io, int PAIRS>
__device__ __forceinline__ void load_pairs(float2 (&x)[PAIRS], const Io* row, float factor) {
  const Words<PAIRS> words = *reinterpret_cast<const Words<PAIRS>*>(row);
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) x[i] = unpack<Io>(words.word[i]) * factor;
}

/// Phase 2 of a warp of block kOf; whether one of the blocks is far. Rows that do not exist hold
/// zeros.
template <class Io, int K, int kOf>
__device__ __forceinline__ bool write_tiles(PrepShared<Io, K>& shared, uint64_t record,
                                            const float2 (&G)[K / 64][8], int first, int column) {
  using R = Record<K>;
  constexpr int kPairs = K / 64;
  constexpr bool kSame = kOf == 0 && kIsBf16<Io>;  // tiles and record hold the same rows
  float2 factor[2][kPairs];
  bool far[2];
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    float2 total[kPairs];
    sum_block(total, shared, block, column);
    far[block] = any_far(total);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) factor[block][i] = exp2_pair(total[i]);
  }
  // Records start at multiples of 128 bytes: the swizzle is an XOR of address bits 4 to 6.
  const auto place = static_cast<uint32_t>(first * kPanelRowBytes + column % 64 * 2);
  const uint64_t read = record + (R::kRead + column / 64 * (2 * kChunk * kPanelRowBytes)) + place;
  const uint64_t update = record + (R::kUpdate + column / 64 * (kChunk * kPanelRowBytes)) + place;
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    const int row = first + t;
    const float2 norm = shared.norm[row];
    float2 q[kPairs];
    float2 k[kPairs];
    float2 last[kPairs];
    load_pairs<Io>(q, &shared.rows.raw_q()[row][column], norm.x);
    load_pairs<Io>(k, &shared.rows.raw_k()[row][column], norm.y);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) last[i] = k[i] * exp2_pair(-G[i][t]);
    put_pairs(&shared.down[row][column], last);
    if (far[kOf]) {  // 2^-G' may be infinite
      sum_block(last, shared, kOf, column);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) last[i] = k[i] * exp2_pair(last[i] - G[i][t]);
    } else {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) last[i] = last[i] * factor[kOf][i];
    }
    if constexpr (kOf == 0) {
      put_pairs(&shared.cross[row][column], last);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) last[i] = last[i] * factor[1][i];
    }
    const uint64_t swizzle = t << 4;
    store_global((update ^ swizzle) + t * kPanelRowBytes, pack_pairs<Io>(last));
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float2 up = exp2_pair(G[i][t]);
      q[i] = q[i] * up;
      k[i] = k[i] * up;
    }
    if constexpr (!kSame) {
      put_pairs(&shared.rows.q[row][column], q);
      put_pairs(&shared.rows.k[row][column], k);
    }
    if constexpr (kOf == 1) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        q[i] = q[i] * factor[0][i];
        k[i] = k[i] * factor[0][i];
      }
    }
    const Words<kPairs> qe = pack_pairs<Io>(q);
    const Words<kPairs> ke = pack_pairs<Io>(k);
    if constexpr (kSame) {
      *reinterpret_cast<Words<kPairs>*>(&shared.rows.q[row][column]) = qe;
      *reinterpret_cast<Words<kPairs>*>(&shared.rows.k[row][column]) = ke;
    }
    store_global((read ^ swizzle) + t * kPanelRowBytes, ke);
    store_global((read ^ swizzle) + (t + kChunk) * kPanelRowBytes, qe);
  }
  return far[0] || far[1];
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

/// A block of prep on its way through the items.
template <class Io, int K>
struct PrepBlock {
  using Traits = PrepTraits<Io, K>;
  static constexpr int kPairs = Traits::kPairs;
  static constexpr int kTokens = Traits::kTokens;

  const PrepParams& p;
  PrepShared<Io, K>& shared;

  static __device__ __forceinline__ int warp() { return this_thread() / 32; }

  /// Starts the loads of q and k.
  __device__ __forceinline__ void load(const PrepItem& item) const {
    const int first = this_thread() / 32 * kTokens;
    load_rows<Io, K>(shared.rows.raw_q(), p.q, item.q, item.rows, first);
    load_rows<Io, K>(shared.rows.raw_k(), p.k, item.k, item.rows, first);
    commit_copies();
  }

  /// The warp's rows of q, k and g to L2.
  __device__ __forceinline__ void prefetch(const PrepItem& item) const {
    const int thread = this_thread();
    const int row = thread / 32 * kTokens + thread % kTokens;
    const int which = thread % 32 / kTokens;
    if (which == 3 || row >= item.rows) return;
    if (which == 0) {
      prefetch_L2(static_cast<const Io*>(p.q.data) + item.q + row * p.q.stride[1], K * 2);
    } else if (which == 1) {
      prefetch_L2(static_cast<const Io*>(p.k.data) + item.k + row * p.k.stride[1], K * 2);
    } else {
      const Tensor& g = p.gate.g;
      const uint32_t size = is_wide(g) ? 4 : 2;
      prefetch_L2(static_cast<const std::byte*>(g.data) + (item.g + row * g.stride[1]) * size,
                  K * size);
    }
  }

  __device__ __forceinline__ uint64_t record_of(const PrepItem& item) const {
    return static_cast<uint64_t>(__cvta_generic_to_global(p.records)) +
           uint64_t{item.record} * Record<K>::kBytes;
  }

  /// Running sums of the warp's own tokens.
  __device__ __forceinline__ void sum_own(float2 (&G)[kPairs][kTokens],
                                          const PrepItem& item) const {
    const int thread = this_thread();
    const int first = thread / 32 * kTokens;
    const int column = thread % 32 * (2 * kPairs);
    load_gates(G, p.gate.g, item.g, item.rows, first, column);
    sum_gates(G, p.gate, item.hv, item.rows - first, column);
  }

  /// Phase 1.
  __device__ __forceinline__ void decay(float2 (&G)[kPairs][kTokens], const PrepItem& item,
                                        float* beta) const {
    sum_own(G, item);
    if (warp() == 0) load_beta(beta, p, item, this_thread());
    const int thread = this_thread();
    const int warp = thread / 32;
    const int column = thread % 32 * (2 * kPairs);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      put_pair(&shared.totals[warp][column + 2 * i], G[i][kTokens - 1]);
    }
    wait_for_copies<0>();
    __syncwarp();
    norm_rows(shared, p.qk_l2norm, warp * kTokens);
    __syncthreads();
    add_before(G, shared, this_thread() / 32, this_thread() % 32 * (2 * kPairs));
  }

  /// Phase 2.
  __device__ __forceinline__ void tiles(const float2 (&G)[kPairs][kTokens],
                                        const PrepItem& item) const {
    const int thread = this_thread();
    const int warp = thread / 32;
    const int first = warp * kTokens;
    const int column = thread % 32 * (2 * kPairs);
    const uint64_t record = record_of(item);
    if (warp == 0) write_decay(shared, record, column);
    const bool has_far = warp < 2 ? write_tiles<Io, K, 0>(shared, record, G, first, column)
                                  : write_tiles<Io, K, 1>(shared, record, G, first, column);
    if (this_thread() == 0) shared.has_far = has_far;
  }

  /// Rows of scores that are far. G is formed once more: kept until here, it would not fit into the
  /// registers.
  __device__ __forceinline__ void replace_far(const PrepItem& item, const float* beta) const {
    const int thread = this_thread();
    const int warp = thread / 32;
    const int first = warp * kTokens;
    const int column = thread % 32 * (2 * kPairs);
    float2 G[kPairs][kTokens];
    sum_own(G, item);
    add_before(G, shared, warp, column);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        put_pair(&shared.G()[first + t][column + 2 * i], G[i][t]);
      }
    }
    __syncthreads();
    replace_far_rows(shared, beta, p.records + uint64_t{item.record} * Record<K>::kBytes,
                     static_cast<const Io*>(p.q.data) + item.q, p.q.stride[1],
                     static_cast<const Io*>(p.k.data) + item.k, p.k.stride[1], item.rows);
    __syncthreads();
  }

  __device__ __forceinline__ void publish(const PrepItem& item) const {
    __syncwarp();
    if (this_thread() % 32 != 0) return;
    asm volatile(
        "fence.acq_rel.gpu;\n st.release.gpu.global.u32 [%0], 1;" ::"l"(p.ready + item.record)
        : "memory");
  }

  /// Counts the warp's items. In shared memory, like what depends on it: 80 registers are full.
  __device__ __forceinline__ uint32_t turn() const {
    return *const_cast<const volatile uint32_t*>(&shared.turn[warp()]);
  }
  __device__ __forceinline__ PrepItem& item(uint32_t turn) const {
    return shared.item[turn % PrepShared<Io, K>::kItems];
  }
  __device__ __forceinline__ float* beta() const { return shared.beta[turn() % 2]; }

  /// Phases 1 to 3 of an item.
  __device__ __forceinline__ void begin() const {
    if (this_thread() == kPrepThreads - 1) {
      find_item<Io, K>(item(turn() + 1), p, item(turn()).number + gridDim.x);
    }
    {
      float2 G[kPairs][kTokens];
      decay(G, item(turn()), beta());
      if (item(turn() + 1).rows > 0) prefetch(item(turn() + 1));
      tiles(G, item(turn()));
    }
    __syncthreads();
    compute_scores(shared, beta(), record_of(item(turn())), warp());
    __syncthreads();
    if (shared.has_far) replace_far(item(turn()), beta());
  }

  __device__ __forceinline__ void run() const {
    if (p.ready != nullptr) clear_ready(p);
    if (threadIdx.x == 0) find_item<Io, K>(shared.item[0], p, blockIdx.x);
    if (threadIdx.x % 32 == 0) shared.turn[threadIdx.x / 32] = 0;
    __syncthreads();
    bool more = shared.item[0].rows > 0;
    if (more) load(shared.item[0]);
    while (more) {
      begin();
      more = item(turn() + 1).rows > 0;
      if (more) load(item(turn() + 1));
      if (turn() % Traits::kWarps == static_cast<uint32_t>(warp())) {
        const PrepItem& done = item(turn());
        write_solve(shared, beta(), record_of(done), p.split_beta);
        if (p.ready != nullptr) publish(done);
      }
      __syncwarp();
      if (this_thread() % 32 == 0) ++shared.turn[warp()];
      __syncwarp();
    }
  }
};

template <class Io, int K>
__global__ void __launch_bounds__(kPrepThreads, kIsBf16<Io> ? kPrepBlocksPerSm : 2)
    sm90_chunk_fwd_prep(const __grid_constant__ PrepParams p) {
  PrepBlock<Io, K>{p, *shared_memory<PrepShared<Io, K>>()}.run();
}

}  // namespace kda::cuda::sm90
