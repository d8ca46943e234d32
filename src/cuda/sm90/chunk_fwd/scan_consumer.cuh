// A consumer warpgroup of scan; its products and their order are in the map of scan.cuh.
#pragma once

#include <cuda/ptx>

#include <type_traits>

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/chunk_fwd/config.h"
#include "cuda/sm90/chunk_fwd/not_finite.cuh"
#include "cuda/sm90/chunk_fwd/scan_load.cuh"
#include "cuda/sm90/chunk_fwd/scan_store.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/sequence.cuh"

namespace kda::cuda::sm90 {

inline constexpr int32_t kFloat32 = 3;  ///< value of kda::DType

/// Walks of so many chunks are wholly of the kind that takes any chunk.
inline constexpr int32_t kFewChunks = 3;

/// Keeps what is computed with x on this side of the asm statements before.
template <int N>
__device__ __forceinline__ void pin(float (&x)[N]) {
#pragma unroll
  for (float& value : x) asm volatile("" : "+f"(value));
}

/// A consumer warpgroup.
template <class IoType, int HeadSize, Walk kOwnWalk = Walk::kForward>
struct ForwardConsumer {
  using Io = IoType;
  static constexpr int K = HeadSize;
  static constexpr Walk kWalk = kOwnWalk;
  static constexpr bool kHasO = kWalk == Walk::kForward;
  static constexpr bool kStores = kHasStoringWarps<kWalk>;
  static constexpr int kState = K / 2;  ///< accumulator registers of S^T

  const ScanParams& p;
  const ForwardWork& work;
  const ForwardMemory<K>& memory;
  ForwardBarriers& barriers;
  int group;
  int thread;  ///< of the warpgroup
  FragmentLane at;
  TransposedLane lines;

  __device__ ForwardConsumer(const ScanParams& params, const ForwardWork& range,
                             const ForwardMemory<K>& shared, ForwardBarriers& sync, int warp,
                             int lane)
      : p(params),
        work(range),
        memory(shared),
        barriers(sync),
        group(warp / 4),
        thread(warp % 4 * 32 + lane),
        at(warp % 4, lane),
        lines(warp % 4, lane) {}

  __device__ __forceinline__ void sync() const { barrier_sync(group_barrier(group), 128); }

  /// This thread is done with a stage. Every thread arrives, not one a warp: it costs no time, and
  /// racecheck follows it.
  __device__ __forceinline__ void release(const StagePosition& position) const {
    ptx::mbarrier_arrive(&barriers.empty[position.stage]);
  }

  /// f(register, offset in the tensor) for every element of S^T that this thread holds; `column` is
  /// that of the warpgroup's first.
  template <class F>
  __device__ __forceinline__ void each_element(const Tensor& t, int64_t row, int64_t column,
                                               F f) const {
    const int64_t base = row * t.stride[0] + work.hv * t.stride[1] +
                         (column + at.row) * t.stride[3] + at.column * t.stride[2];
#pragma unroll
    for (int i = 0; i < kState; ++i) {
      f(i, base + (i / 4 * 8 + i % 2) * t.stride[2] + i / 2 % 2 * 8 * t.stride[3]);
    }
  }

  /// f(elements of the state tensor), which is fp32 or 16-bit.
  template <class F>
  static __device__ __forceinline__ void with_state(const Tensor& t, F f) {
    if (t.dtype == kFloat32) {
      f(static_cast<float*>(t.data));
    } else {
      f(static_cast<Io*>(t.data));
    }
  }

  /// Of this warpgroup: columns of the transition, and not of V.
  __device__ __forceinline__ bool in_transition() const {
    return kWalk == Walk::kSummary && column() >= p.heads.V;
  }

  __device__ __forceinline__ void load_identity(float (&state)[kState]) const {
    const int row = static_cast<int>(column() - p.heads.V) + at.row;
#pragma unroll
    for (int i = 0; i < kState; ++i) {
      state[i] = i / 4 * 8 + i % 2 + at.column == row + i / 2 % 2 * 8 ? 1 : 0;
    }
  }

  /// Of `starts`, which kRescan finds in h; wrong cu_seqlens must not lead out of it.
  __device__ __forceinline__ int64_t start_row() const {
    if constexpr (kWalk != Walk::kRescan) return work.segment.row;
    return min(int64_t{work.first_h}, p.h_row_count - 1);
  }

  /// kForward takes initial_state only where no other block of its launch can have written
  /// final_state, which may be the same memory: where a sequence is cut, it takes the copy that the
  /// summary has made.
  __device__ __forceinline__ void load_state(float (&state)[kState]) const {
    if (in_transition()) return load_identity(state);
    const bool is_first = work.segment.index == 0;
    if (is_first ? p.initial_state.data == nullptr : kWalk == Walk::kSummary) {
#pragma unroll
      for (int i = 0; i < kState; ++i) state[i] = 0;
      return;
    }
    const bool given = is_first && (kWalk != Walk::kForward || work.segment.is_last);
    with_state(given ? p.initial_state : p.starts, [&](auto* from) {
      each_element(given ? p.initial_state : p.starts, given ? work.sequence : start_row(),
                   column(),
                   [&](int i, int64_t offset) { state[i] = to_real<float>(from[offset]); });
    });
    if (kWalk == Walk::kSummary) store_state(state, p.starts, work.segment.row, column());
  }

  __device__ __forceinline__ void store_state(const float (&state)[kState], const Tensor& t,
                                              int64_t row, int64_t first_column) const {
    with_state(t, [&]<class T>(T* to) {
      each_element(t, row, first_column,
                   [&](int i, int64_t offset) { to[offset] = from_real<T>(state[i]); });
    });
  }

  /// What the walk leaves: for a segment that others follow nothing, or the start of the next one
  /// and the transition.
  __device__ __forceinline__ void store_state(const float (&state)[kState]) const {
    if (in_transition()) {
      store_state(state, p.transitions, work.segment.row, column() - p.heads.V);
    } else if (kWalk == Walk::kSummary) {
      store_state(state, p.starts, work.segment.row + 1, column());
    } else if (p.final_state.data != nullptr && work.segment.is_last) {
      store_state(state, p.final_state, work.sequence, column());
    }
  }

  /// Part of the fragments of a panel that this thread writes or reads, transposing.
  __device__ __forceinline__ uint32_t panel_line(const unsigned char* panel, int step) const {
    return static_cast<uint32_t>(__cvta_generic_to_shared(panel)) + lines.offset(step);
  }

  /// h^T packed, to the staging.
  __device__ __forceinline__ void store_h(const uint32_t (&h)[kState / 2], int32_t chunk,
                                          int32_t before) const {
    if (!has_h<kWalk>(p, work, chunk)) return;
    wait_for(h_free(chunk, before));
    unsigned char* const staging = memory.h(group);
#pragma unroll
    for (int step = 0; step < K / 16; ++step) {
      stmatrix_transposed(panel_line(staging, step), h + 4 * step);
    }
    publish_to_async_proxy();
    barrier_arrive(h_barrier(group), kStoringThreads);
  }

  /// First of this warpgroup's columns of V.
  __device__ __forceinline__ int32_t column() const { return column_of(work, group); }

  /// Chunks that this walk and an earlier one, of `before` chunks, took ahead of a chunk.
  __device__ __forceinline__ int32_t turn_of(int32_t chunk, int32_t before) const {
    return kWalk == Walk::kReverse ? work.chunks - 1 - chunk : before + chunk;
  }

  /// When the staging of o and h of a chunk is free.
  __device__ __forceinline__ Phase o_free(int32_t chunk, int32_t before) const {
    const int32_t turn = turn_of(chunk, before);
    return {&barriers.o_free[group][turn % 2], (turn / 2 & 1) ^ 1u};
  }
  __device__ __forceinline__ Phase h_free(int32_t chunk, int32_t before) const {
    const int shift = h_shift<kWalk>(p);
    const int32_t turn = kWalk == Walk::kReverse ? (work.chunks - chunk) >> shift
                                                 : ((before + shift) >> shift) + (chunk >> shift);
    return {&barriers.h_free[group], (turn & 1) ^ 1u};
  }

  /// Rows of o of a chunk, from registers to the staging, which is free.
  __device__ __forceinline__ void store_o(const uint32_t (&o)[8], int32_t chunk,
                                          int32_t before) const {
    const int buffer = turn_of(chunk, before) % 2;
    unsigned char* const staging = memory.o(group, buffer);
    stmatrix_transposed(panel_line(staging, 0), o);
    stmatrix_transposed(panel_line(staging, 1), o + 4);
    barrier_arrive(o_barrier(group, buffer), kStoringThreads);
  }

  /// Once a chunk's stage is full: its tile of v or do.
  __device__ __forceinline__ void load_tokens(uint32_t (&x)[8], const StagePosition& position,
                                              int32_t chunk) const {
    wait_for(&barriers.full[position.stage], position.parity);
    if (in_transition()) {
#pragma unroll
      for (uint32_t& pair : x) pair = 0;
      return;
    }
    read_tokens(x, position.stage, chunk);
  }

  /// Transposed; zeros beyond the sequence, where the tile may hold rows of another.
  template <bool kPlain = false>
  __device__ __forceinline__ void read_tokens(uint32_t (&x)[8], int stage, int32_t chunk) const {
    const unsigned char* const tile = memory.v(stage, group);
    ldmatrix_transposed(x, panel_line(tile, 0));
    ldmatrix_transposed(x + 4, panel_line(tile, 1));
    if constexpr (!kPlain) clear_absent(x, chunk);
  }

  /// Zeros in the place of tokens beyond the sequence.
  __device__ __forceinline__ void clear_absent(uint32_t (&x)[8], int32_t chunk) const {
    const int rows = rows_of(work, chunk);
    if (rows == kChunk) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int token = i / 2 * 8 + at.column;
      x[i] = token < rows ? (token + 1 < rows ? x[i] : x[i] & 0xffffu) : 0;
    }
  }

  /// The first token whose v is not finite in each of the lane's columns of V; kChunk: none.
  __device__ __forceinline__ void first_spoilt(int (&first)[2], int stage, int32_t chunk) const {
    uint32_t x[8];
    read_tokens(x, stage, chunk);
    first_not_finite<Io>(first, x, at);
  }

  /// NaN in each column of V from its first token on whose v is not finite.
  __device__ __forceinline__ void spoil_o(uint32_t (&o)[8], int stage, int32_t chunk) const {
    int first[2];
    first_spoilt(first, stage, chunk);
    spoil_from(first, o, at);
  }
  /// The state of these columns.
  __device__ __forceinline__ void spoil_state(float (&state)[kState], int stage,
                                              int32_t chunk) const {
    int first[2];
    first_spoilt(first, stage, chunk);
#pragma unroll
    for (int i = 0; i < kState; ++i) {
      if (first[i / 2 % 2] < kChunk) state[i] = __int_as_float(0x7fffffff);
    }
  }

  /// beta of the columns of pair i of packed accumulators [64 x 32].
  __device__ __forceinline__ float2 beta_of(const unsigned char* record, int i) const {
    return *reinterpret_cast<const float2*>(record + Record<K>::kBeta +
                                            (i / 2 * 8 + at.column) * 4);
  }

  __device__ __forceinline__ void decay(float (&state)[kState], const unsigned char* record) const {
    const auto* const factor = reinterpret_cast<const float*>(record + Record<K>::kDecay);
#pragma unroll
    for (int i = 0; i < kState / 4; ++i) {
      const float2 f = *reinterpret_cast<const float2*>(factor + 8 * i + at.column);
      state[4 * i] *= f.x;
      state[4 * i + 1] *= f.y;
      state[4 * i + 2] *= f.x;
      state[4 * i + 3] *= f.y;
    }
    pin(state);  // here, under the product in flight, and not where the compiler would sink it to
  }

  /// The products before the last `Groups` are over at this point in any case. Without this
  /// statement the compiler waits for all before it lets the state, their result, be used.
  template <int Groups>
  static __device__ __forceinline__ void older_products_are_over() {
    wgmma_wait<Groups>();
  }

  /// Z = h^T tile^T with h^T the state, packed; the second half of it under the first half's
  /// products. The last group of products is left open.
  template <class Tile>
  __device__ __forceinline__ void multiply_packed(float (&Z)[16], uint32_t (&h)[kState / 2],
                                                  const float (&state)[kState],
                                                  const Tile& tile) const {
#pragma unroll
    for (int step = 0; step < K / 16; ++step) {
      if (step % 4 == 0) {
        if (step > 0) {
          wgmma_commit();
          older_products_are_over<1>();
        }
#pragma unroll
        for (int i = 4 * step; i < 4 * step + 16; ++i) {
          h[i] = pack<Io>(state[2 * i], state[2 * i + 1]);
        }
        wgmma_fence();
      }
      wgmma_rs<Io, Major::kSummed>(Z, h + 4 * step, tile.columns(step), step > 0);
    }
  }

  /// v: of chunk c, and afterwards of the one that follows. before: chunks of an earlier walk.
  /// kPlain: both have all their rows, and v is taken for finite. What other chunks need would lie
  /// between the instructions that every chunk needs, and be jumped over.
  template <bool kPlain>
  __device__ __forceinline__ void chunk(float (&state)[kState], uint32_t (&v)[8], int32_t c,
                                        int32_t before, const StagePosition& position,
                                        const StagePosition& next) const {
    const unsigned char* const record = memory.record(position.stage);
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(record));
    const PanelTile<2 * kChunk> ke{address + Record<K>::kRead};
    [[maybe_unused]] const PanelTile<2 * kChunk> qe{address + Record<K>::kRead +
                                                    kChunk * kPanelRowBytes};
    const PanelTile<kChunk> kg{address + Record<K>::kUpdate};
    const SquareTile A1{address + Record<K>::kSolve};
    [[maybe_unused]] const SquareTile P{address + Record<K>::kScores};

    uint32_t h[kState / 2];
    float Z[16];
    [[maybe_unused]] float O[16];
    multiply_packed(Z, h, state, ke);
    wgmma_commit();
    if constexpr (kHasO) {
#pragma unroll
      for (int step = 0; step < K / 16; ++step) {
        wgmma_rs<Io, Major::kSummed>(O, h + 4 * step, qe.columns(step), step > 0);
      }
      wgmma_commit();
    }
    // v that is not finite must not meet the zeros above the diagonals of A - I and P.
    const bool spoilt = kHasO && !kPlain && any_not_finite<Io>(v);
    if (spoilt) clear_not_finite<Io>(v);
    older_products_are_over<kHasO ? 2 : 1>();
    decay(state, record);
    wgmma_wait<kHasO ? 1 : 0>();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 value = unpack<Io>(v[i]);
      const float2 beta = beta_of(record, i);
      Z[2 * i] = beta.x * (value.x - Z[2 * i]);  // r
      Z[2 * i + 1] = beta.y * (value.y - Z[2 * i + 1]);
      v[i] = pack<Io>(Z[2 * i], Z[2 * i + 1]);
    }
    wgmma_fence();
    wgmma_rs<Io, Major::kSummed>(Z, v, A1.columns(0), true);
    wgmma_rs<Io, Major::kSummed>(Z, v + 4, A1.columns(1), true);
    wgmma_commit();
    const bool goes_on = kPlain || c + 1 < work.chunks;
    // Asked under the product, for an answer takes as long.
    [[maybe_unused]] const Phase next_full{&barriers.full[next.stage], next.parity};
    const bool is_next_full = kHasO && goes_on && is_over(next_full);
    const bool is_staging_free = kStores && is_over(o_free(c, before));
    wgmma_wait<0>();
    if constexpr (kHasO) store_h(h, c, before);
    uint32_t v_new[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v_new[i] = pack<Io>(Z[2 * i], Z[2 * i + 1]);
    wgmma_fence();
    if constexpr (kHasO) {
      wgmma_rs<Io, Major::kSummed>(O, v_new, P.columns(0), true);
      wgmma_rs<Io, Major::kSummed>(O, v_new + 4, P.columns(1), true);
      wgmma_commit();
    }
    wgmma_rs<Io, Major::kOuter>(state, v_new, kg.rows(0), true);
    wgmma_rs<Io, Major::kOuter>(state, v_new + 4, kg.rows(1), true);
    wgmma_commit();
    if constexpr (kHasO) {
      if (goes_on) {
        if (!is_next_full) wait_for(next_full);
        read_tokens<kPlain>(v, next.stage, c + 1);
      }
      if (!is_staging_free) wait_for(o_free(c, before));
      wgmma_wait<1>();
      uint32_t o[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) o[i] = pack<Io>(p.scale * O[2 * i], p.scale * O[2 * i + 1]);
      if (spoilt) spoil_o(o, position.stage, c);
      store_o(o, c, before);
    } else {
      if constexpr (kWalk != Walk::kSummary) {
        if (!is_staging_free) wait_for(o_free(c, before));
        store_o(v_new, c, before);
        store_h(h, c, before);
      }
      if (goes_on) load_tokens(v, next, c + 1);
    }
    wgmma_wait<0>();
    if (spoilt) spoil_state(state, position.stage, c);
    release(position);
  }

  template <bool kTrusting>
  __device__ __forceinline__ void walk(float (&state)[kState], int32_t before) const {
    load_state(state);
    StagePosition position = StagePosition::of(before, memory.stages);
    uint32_t v[8];
    if (work.chunks > 0) load_tokens(v, position, 0);
    int32_t c = 0;
    const auto step = [&]<bool kPlain>(std::bool_constant<kPlain>) {
      StagePosition next = position;
      next.advance(memory.stages);
      chunk<kPlain>(state, v, c, before, position, next);
      position = next;
      ++c;
    };
    if constexpr (kTrusting) {
      // Code of a second kind comes from memory at first, which takes longer than a few chunks
      // gain.
      const int32_t plain = work.chunks > kFewChunks ? whole_chunks(work) - 1 : 0;
      while (c < plain) step(std::bool_constant<true>{});
    }
    while (c < work.chunks) step(std::bool_constant<false>{});
  }

  __device__ __forceinline__ void finish(const float (&state)[kState]) const { store_state(state); }
};

}  // namespace kda::cuda::sm90
