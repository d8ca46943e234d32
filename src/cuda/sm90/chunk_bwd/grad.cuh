// grad: a pair of chunks of 32 tokens and one value head; h before and dh behind the pair, v_new
// and R of it and the raw inputs -> dq, dk, dv, dg, dbeta and the chunks' parts of dA_log and
// ddt_bias.
//
// Grid: as many blocks as fit the SMs, two each (K = 64: three), so that one computes while the
// other waits. A block of K / 64 warpgroups walks over pairs and value heads, heads fastest, in
// steps of the grid; an item is a chunk of a pair, the later one first. A warpgroup owns 64
// channels.
// What the chunks of a pair exchange is in grad_cross.cuh.
//
// Accumulators are transposed, [64 channels x 32 tokens]. With h, dh as A operands, in tiles of 64
// columns of V:
//   [dqe | Y]^T = h [do; R]^T                            wgmma m64n64
//   dkx^T = dh v_new^T, also for the earlier chunk       m64n64
//   [dP; dL] = [do; R] v_new^T, also over the earlier chunk: a warpgroup each    m64n32
//   rowsum_V(h . dh)                                     mma.sync, under the products
//   rowsum_V(R . v), dv = beta R                         CUDA cores, under the products
// The gates come between the first and the second tile, whose loads they hide; then the intra part
// (grad_intra.cuh) with operands of two bf16 terms, of 48 and 64 rows, and everything of
// (5.32), (5.33) in the accumulators' layout (grad_finish.cuh), at last the gates' backward
// (grad_gates.cuh). The first tiles of the next item load from the moment on when nothing reads the
// operands of the intra part, its q, k and g once dq and dk have left their place.
//
// Shared memory, bytes, K = 128:
//   tiles of h, dh, [do; R], v       45056   later operands of the intra part and of the pair
//   v_new of both chunks              8192   later [dP; dL]
//   G, fp32                          16896   later the steps of dg
//   q, k                             17408   later dq, dk
//   raw g, room for fp32             17408
//   sums, scalars, work items        10176
//
// Barriers: `states_full`, an mbarrier, for h and dh; `update_full` for the earlier chunk's kg and
// decay; named barriers 1 + g within warpgroup g, around the change of its intra operands;
// __syncthreads between the other phases.
#pragma once

#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/chunk_bwd/grad_finish.cuh"

namespace kda::cuda::sm90 {

/// Row of the record of the first chunk of a pair.
__device__ __forceinline__ int64_t first_record(const GradParams& p, uint32_t row) {
  const Sequences& pairs = p.sequences;
  const Sequences& chunks = p.record_sequences;
  if (pairs.cu.data == nullptr) {
    if (pairs.count == 1) return 2 * int64_t{row};
    const auto per_row = static_cast<uint32_t>(pairs.chunks_per_row);
    return row / per_row * chunks.chunks_per_row + 2 * (row % per_row);
  }
  const int64_t sequence = pairs.entries[row].sequence;
  return clamp_index(chunks.offsets[sequence] + 2 * (row - pairs.offsets[sequence]), 0,
                     chunks.chunk_rows - 1);
}

/// Into `next`, by one warp: what comes after `last`. That is the earlier chunk of its pair, or of
/// the first pair in this block's steps that has tokens the later one, which may be the only one;
/// one without rows if there is none. Other warps wait for it: no division where it can be helped.
__device__ __forceinline__ void find_grad_work(const GradLaunchParams& p,
                                               const RowSource (&sources)[kGradRows],
                                               const GradWork& last, GradWork& next) {
  const int lane = thread_index() % 32;
  const bool carries = last.crosses;
  bool crosses = false;
  Chunk chunk{};
  GradPair found = last.pair;
  GradPair after = last.after;
  if (carries) {
    chunk = {last.chunk.batch, last.chunk.begin - kChunk, kChunk};
  } else {
    const auto count = static_cast<uint32_t>(p.sequences.chunk_rows);
    while (after.row < count && chunk.rows == 0) {
      found = after;
      after = after.next(p);
      chunk = small_chunk_of(p.sequences, found.row);
      crosses = chunk.rows > kChunk;
      if (chunk.rows == 0) clear_partial(p, 2 * int64_t{found.row}, found.hv, lane);
      if (!crosses) clear_partial(p, 2 * int64_t{found.row} + 1, found.hv, lane);
    }
    if (crosses) {
      chunk.begin += kChunk;
      chunk.rows -= kChunk;
    }
  }
  if (lane < kGradRows) {
    const auto group = static_cast<uint32_t>(p.heads.group);
    const uint32_t head = lane > kRowsK || group == 1 ? found.hv : found.hv / group;
    next.rows[lane] = sources[lane].row(chunk, head);
  }
  if (lane > 0) return;
  next.chunk = chunk;
  next.crosses = crosses;
  next.carries = carries;
  next.pair = found;
  next.row = 2 * int64_t{found.row} + (crosses ? 1 : 0);
  next.record = crosses ? first_record(p, found.row) : 0;
  next.after = after;
  next.crossings = last.crossings + (last.crosses ? 1 : 0);
}

template <class Io, int K, int GATE>
struct GradBlock {
  using Traits = GradTraits<Io, K>;

  /// What the walk over V leaves: accumulators and the sums of CUDA cores.
  struct ValueSums {
    float S[32];
    float dkx[32];  ///< of this chunk; dh times v_new of the earlier one
    float scores[Traits::kScores];
    float2 state_product{0, 0};  ///< of the channels of multiply_states
    float value_product[Traits::kValueRows] = {};
    float unit = 1;  ///< fp16: of what is linear in R or dh

    /// What is linear in R or dh, in another unit. R has the lower half of the rows of `scores`.
    __device__ __forceinline__ void move_to(float next, int warp) {
      const float factor = unit / next;
      unit = next;
      if (factor == 1) return;
#pragma unroll
      for (int i = 0; i < 16; ++i) S[16 + i] *= factor;
#pragma unroll
      for (float& x : dkx) x *= factor;
#pragma unroll
      for (float& x : scores) x *= warp % 4 >= 2 ? factor : 1;
      state_product = state_product * factor;
#pragma unroll
      for (float& x : value_product) x *= factor;
    }
  };

  GradShared<Io, K>& shared;
  const GradLaunchParams& p;
  const GradWork& work;
  int tid;
  int warp;
  int lane;

  /// This thread's copies have landed: all have, visible to wgmma.
  __device__ __forceinline__ void fence_tiles(int v0) const {
    ptx::fence_proxy_async(ptx::space_shared);
    wait_for(&shared.states_full, (work.tiles + static_cast<uint32_t>(v0 / kGradColumns)) % 2);
    __syncthreads();
  }

  __device__ __forceinline__ void issue_value_products(ValueSums& sums, bool add) const {
    const int group = __shfl_sync(~0u, thread_index() / 128, 0);
    const uint32_t half = static_cast<uint32_t>(group) * 64 * kPanelRowBytes;
    const PanelTile<K> h{shared_address(shared.value.h) + half};
    const PanelTile<K> dh{shared_address(shared.value.dh) + half};
    const PanelTile<2 * kChunk> do_R{shared_address(shared.value.do_R)};
    const PanelTile<2 * kChunk> v_new{shared_address(shared.v_new)};
    // With two warpgroups, the second has the scores over the earlier chunk.
    const PanelTile<2 * kChunk> scored{shared_address(shared.v_new) +
                                       static_cast<uint32_t>(group) * kChunk * kPanelRowBytes};
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kGradColumns / 16; ++step) {
      wgmma_ss<Io, Major::kSummed, Major::kSummed>(sums.S, h.columns(step), do_R.columns(step),
                                                   add || step > 0);
    }
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kGradColumns / 16; ++step) {
      wgmma_ss<Io, Major::kSummed, Major::kSummed>(sums.dkx, dh.columns(step), v_new.columns(step),
                                                   add || step > 0);
    }
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kGradColumns / 16; ++step) {
      wgmma_ss<Io, Major::kSummed, Major::kSummed>(sums.scores, do_R.columns(step),
                                                   scored.columns(step), add || step > 0);
    }
    wgmma_commit();
  }

  /// The products of columns v0 .. of V, whose tiles are on their way; LATER groups of copies after
  /// them.
  template <int LATER>
  __device__ __forceinline__ void take_values(ValueSums& sums, int v0) const {
    wait_for_copies<LATER>();
    fence_tiles(v0);
    float unit = p.mantissa;
    if constexpr (Traits::kHasUnits) {
      unit = p.units[(work.row * p.heads.HV + work.pair.hv) * (p.heads.V / kGradColumns) +
                     v0 / kGradColumns];
      if (v0 == 0) sums.unit = unit;
      sums.move_to(unit, warp);
    }
    issue_value_products(sums, v0 > 0);
    if (!work.carries) sums.state_product = multiply_states(shared, sums.state_product);
    finish_values(shared, p, work, v0, unit, sums.value_product);
    wgmma_wait<0>();
  }

  /// The products of all columns but the first 64; those of the next are on their way.
  __device__ __forceinline__ void walk_values(ValueSums& sums) const {
    const int V = static_cast<int>(p.heads.V);
#pragma unroll 1
    for (int v0 = kGradColumns; v0 < V; v0 += kGradColumns) {
      asm volatile("" : "+r"(v0));  // addresses are formed here, not kept across the products
      take_values<0>(sums, v0);
      if (v0 + kGradColumns >= V) break;
      __syncthreads();
      load_value_tiles(shared, p, work, v0 + kGradColumns);
      commit_copies();
    }
  }

  __device__ __forceinline__ void put_value_sums(const ValueSums& sums) const {
    if constexpr (Traits::kHasUnits) {
      if (tid == 0) shared.extra.unit = sums.unit;
    }
    if (lane / 8 == lane % 4) {
      float* const to = shared.state_product + 16 * warp + lane / 4;
      to[0] = sums.state_product.x;
      to[8] = sums.state_product.y;
    }
#pragma unroll
    for (int i = 0; i < Traits::kValueRows; ++i) {
      float sum = sums.value_product[i];
      for (int step = 4; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (tid % 8 == 0) shared.value_product[tid / 8 + i * (kChunk / Traits::kValueRows)] = sum;
    }
  }

  /// Once the tiles in whose place they go have been read.
  __device__ __forceinline__ void put_scores(const ValueSums& sums) const {
    if (warp < 4) put_scores_gradient(shared, sums.scores, p.scale, unit_of(shared, p), warp, lane);
    if (!work.crosses || (Traits::kWarps > 4 && warp < 4)) return;
    const float* const cross = sums.scores + Traits::kScores - 16;
    put_cross_gradient(shared, cross, p.scale, unit_of(shared, p), warp % 4, lane);
  }

  /// G and the norms from the raw rows.
  __device__ __forceinline__ void put_decays() const {
    sum_decays<GATE>(shared, p, work.chunk.rows);
    find_norms(shared, p);
    __syncthreads();
    join_segments(shared);
  }

  /// S += [dq2 | z]^T, all but the rows' factor. The products are left open.
  __device__ __forceinline__ void multiply_rows(float (&S)[32]) const {
    const PanelTile<kArranged> columns{fresh_address(shared.intra.keys[warp / 4].columns[0])};
    wgmma_fence();
    add_rows(S, columns, 0);
    add_rows(S, columns, kRestOfScores);
    add_rows(S, second_term(columns), 0);
    wgmma_commit();
  }
  /// With one term of the scores, blocks of 16 rows: the first has columns of block 0, the second
  /// of both.
  __device__ __forceinline__ void add_rows(float (&S)[32], const PanelTile<kArranged>& columns,
                                           uint64_t term) const {
    const PanelTile<2 * kChunk> scores{fresh_address(shared.scores)};
#pragma unroll
    for (int row = 0; row < 2 * kChunk; row += kBlock) {
      const int second = row % kChunk / kBlock;
#pragma unroll
      for (int block = 0; block <= second; ++block) {
        wgmma_ss<Bf16, Major::kOuter, Major::kSummed>(
            part_of<kBlock / 2>(S + row / 2), columns.rows(second + block),
            scores.columns(block) + term + row * (kPanelRowBytes >> 4), true);
      }
    }
  }

  /// dkc^T before the columns' factors, arranged.
  __device__ __forceinline__ void multiply_columns(float (&x)[24]) const {
    const PanelTile<2 * kChunk> rows{fresh_address(shared.intra.keys[warp / 4].rows[0])};
    wgmma_fence();
    add_columns(x, rows, 0, false);
    add_columns(x, rows, kRestOfScores, true);
    add_columns(x, second_term(rows), 0, true);
    wgmma_commit();
    wgmma_wait<0>();
  }
  __device__ __forceinline__ void add_columns(float (&x)[24], const PanelTile<2 * kChunk>& rows,
                                              uint64_t term, bool add) const {
    const PanelTile<2 * kChunk> scores{fresh_address(shared.scores)};
#pragma unroll
    for (int step = 0; step < 2 * kChunk / kBlock; step += 2) {  // of q, of beta k
      wgmma_ss<Bf16, Major::kOuter, Major::kOuter>(part_of<kBlock / 2>(x), rows.rows(step),
                                                   scores.rows(step) + term, add || step > 0);
      wgmma_ss<Bf16, Major::kOuter, Major::kOuter>(part_of<kBlock>(x + kBlock / 2),
                                                   rows.rows(step + 1),
                                                   scores.rows(step + 1) + term, add || step > 0);
    }
  }

  /// One item. The tiles of its first columns of V are on their way, then its rows; leaves those of
  /// `next` so.
  __device__ __forceinline__ void run(GradWork& next) const {
    ValueSums sums;
    take_values<1>(sums, 0);
    wait_for_copies<0>();
    __syncthreads();
    if (p.heads.V > kGradColumns) load_value_tiles(shared, p, work, kGradColumns);
    commit_copies();
    put_decays();
    walk_values(sums);
    put_value_sums(sums);
    __syncthreads();
    if (work.crosses && tid == 0) load_update(shared, p, work);
    if (warp == Traits::kWarps - 1) {  // the search comes where this warp has no scores to put
      find_grad_work(p, shared.sources, work, next);
      if (lane == 0) next.tiles = work.tiles + static_cast<uint32_t>(p.heads.V) / kGradColumns;
    }
    put_scores(sums);
    KeyWriter<Io, K>(shared).put_columns();
    ptx::fence_proxy_async(ptx::space_shared);
    __syncthreads();
    GradFinish<Io, K> finish(shared, p, work, warp, thread_index() % 32);
    if (work.crosses) finish.cross.add_states(sums.S, sums.dkx);
    finish.scale_rows(sums.S);
    if (work.carries) finish.cross.take_dkx(sums.dkx);
    multiply_rows(sums.S);
    {  // under the products; in their operands' place once they are over
      uint2 rows[2][2][4];
      KeyWriter<Io, K>(shared).make_rows(rows);
      wgmma_wait<0>();
      finish.cross.sync_group();
      KeyWriter<Io, K>(shared).put_rows(rows);
    }
    ptx::fence_proxy_async(ptx::space_shared);
    finish.cross.sync_group();
    if (work.crosses) finish.cross.leave_keys();
    float dkg[2][8] = {};  // what the later chunk left arrives under the products
    if (work.carries) finish.cross.template take_dkg<0>(dkg[0]);
    float x[24];
    multiply_columns(x);
    float W[16];
    finish.template combine_block<0>(sums.S, sums.dkx, x, dkg[0], W);
    if (work.carries) finish.cross.template take_dkg<1>(dkg[1]);
    finish.template combine_block<1>(sums.S, sums.dkx, x, dkg[1], W);
    __syncthreads();
    if (next.chunk.rows > 0) load_value_tiles(shared, p, next, 0);
    commit_copies();
    const GradScalars scalars = load_scalars(p, next);
    GradFinish<Io, K>(shared, p, work, warp, thread_index() % 32)
        .template store_all<GATE>(sums.S, sums.dkx, W);
    __syncthreads();
    if (next.chunk.rows > 0) {
      load_key_rows(shared, p, next);
      commit_copies();
      put_scalars(shared, p, next.chunk.rows, scalars);
    }
    store_partial(shared, p, work);
  }
};

template <class Io, int K, int GATE>
__global__ void __launch_bounds__(GradTraits<Io, K>::kThreads, GradTraits<Io, K>::kBlocksPerSm)
    sm90_chunk_bwd_grad(const __grid_constant__ GradLaunchParams p) {
  extern __shared__ __align__(1024) unsigned char dynamic[];
  auto& shared = *reinterpret_cast<GradShared<Io, K>*>(dynamic);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&shared.states_full, 1);
    ptx::mbarrier_init(&shared.update_full, 1);
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    shared.work[0].tiles = 0;
    shared.work[1] = {};
    const auto HV = static_cast<uint32_t>(p.heads.HV);
    shared.work[1].after = {blockIdx.x / HV, blockIdx.x % HV};
  }
  if (threadIdx.x < kGradRows) shared.sources[threadIdx.x] = RowSource(p.rows[threadIdx.x]);
  __syncwarp();
  if (threadIdx.x < 32) find_grad_work(p, shared.sources, shared.work[1], shared.work[0]);
  __syncthreads();
  if (shared.work[0].chunk.rows == 0) return;
  load_value_tiles(shared, p, shared.work[0], 0);
  commit_copies();
  load_key_rows(shared, p, shared.work[0]);
  commit_copies();
  put_scalars(shared, p, shared.work[0].chunk.rows, load_scalars(p, shared.work[0]));
#pragma unroll 1
  for (int at = 0;; at ^= 1) {
    const GradWork& work = shared.work[at];
    GradWork& next = shared.work[at ^ 1];
    const int tid = thread_index();
    const int warp = __shfl_sync(~0u, tid / 32, 0);
    __builtin_assume(warp >= 0);
    GradBlock<Io, K, GATE>{shared, p, work, tid, warp, tid % 32}.run(next);
    if (next.chunk.rows == 0) return;
  }
}

}  // namespace kda::cuda::sm90
