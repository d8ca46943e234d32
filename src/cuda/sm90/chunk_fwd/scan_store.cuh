// From the staging of scan to memory: tiles of o and h, and the warps that store them.
#pragma once

#include <cuda/ptx>

#include "cuda/ptx/barrier.cuh"
#include "cuda/sm90/chunk_fwd/scan_load.cuh"

namespace kda::cuda::sm90 {

/// Whether warps of their own store what the consumers leave in the staging: with few heads time is
/// that of a consumer's instructions.
template <Walk kWalk>
inline constexpr bool kHasStoringWarps = kWalk != Walk::kSummary;

/// Named barriers of a consumer warpgroup: its own, and those that its storing warp waits at, one
/// a buffer of the staging.
inline constexpr int kStoringThreads = 128 + 32;
__device__ __forceinline__ int group_barrier(int group) { return 1 + group; }
__device__ __forceinline__ int o_barrier(int group, int buffer) {
  return 1 + kMostGroups + 3 * group + buffer;
}
__device__ __forceinline__ int h_barrier(int group) { return o_barrier(group, 2); }

/// First of a warpgroup's columns of V.
__device__ __forceinline__ int32_t column_of(const ForwardWork& work, int group) {
  return static_cast<int32_t>(work.v0) + group * kGroupColumns;
}

/// log2 of the chunks of a row of h: the caller's chunks have 32 or 64 tokens, the backward's 64.
template <Walk kWalk>
__device__ __forceinline__ int h_shift(const ScanParams& p) {
  return kWalk == Walk::kRescan || kWalk == Walk::kReverse || p.chunk_size == 2 * kChunk ? 1 : 0;
}
/// Whether the state at a chunk is a row of h. h stands before the chunks of its row, dh behind
/// them.
template <Walk kWalk>
__device__ __forceinline__ bool has_h(const ScanParams& p, const ForwardWork& work, int32_t chunk) {
  if (p.h.data == nullptr) return false;
  const int last = (1 << h_shift<kWalk>(p)) - 1;
  if (kWalk != Walk::kReverse) return (chunk & last) == 0;
  return (chunk & last) == last || chunk + 1 == work.chunks;
}

/// Units of 16 bytes of a tile of o, of which the lanes of a warp take one each of some rows.
template <class Io>
struct OUnits {
  static constexpr int kRowsAtOnce = 4;
  static constexpr int kRows = kChunk / kRowsAtOnce;  ///< of a lane

  Io* to;
  int64_t stride;
  int first_row;
  int unit;

  __device__ __forceinline__ OUnits(const ScanParams& p, const ForwardWork& work, int group,
                                    int32_t chunk, int lane)
      : stride(p.o.stride[1]), first_row(lane / 8), unit(lane % 8) {
    const int64_t token = work.range.begin + int64_t{chunk} * kChunk;
    to = static_cast<Io*>(p.o.data) + token_offset(p.o, work.range.batch, token, work.hv) +
         column_of(work, group) + unit * kUnitElements;
  }
  __device__ __forceinline__ void load(uint4 (&x)[kRows], const unsigned char* staging) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = first_row + i * kRowsAtOnce;
      x[i] = *reinterpret_cast<const uint4*>(staging + unit_offset(row, unit));
    }
  }
  /// Those of the first rows; the others may be another sequence's.
  __device__ __forceinline__ void store(const uint4 (&x)[kRows], int rows) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = first_row + i * kRowsAtOnce;
      if (row < rows) *reinterpret_cast<uint4*>(to + row * stride) = x[i];
    }
  }
};

/// Starts the copy of a tile of h; one thread.
template <Walk kWalk>
__device__ __forceinline__ void copy_h(const ScanParams& p, const ForwardWork& work, int group,
                                       int32_t chunk, const unsigned char* staging) {
  const int32_t to[4] = {column_of(work, group), 0, static_cast<int32_t>(work.hv),
                         work.first_h + (chunk >> h_shift<kWalk>(p))};
  ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &p.h_map, to, staging);
  ptx::cp_async_bulk_commit_group();
}

/// The storing warp of a consumer warpgroup. o passes through its registers: for a copy by TMA the
/// consumers would have to wait until their writes are visible to it. h, 16 KB every other chunk,
/// does not: that takes the warp so long that the consumers wait for it. before: chunks of an
/// earlier walk.
template <class Io, int K, Walk kWalk>
__device__ void store_chunks(const ScanParams& p, const ForwardWork& work,
                             const ForwardMemory<K>& memory, ForwardBarriers& barriers, int group,
                             int32_t before) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int32_t i = 0; i < work.chunks; ++i) {
    const int32_t chunk = kWalk == Walk::kReverse ? work.chunks - 1 - i : i;
    const bool with_h = has_h<kWalk>(p, work, chunk);
    const auto start_h = [&] {
      if (!with_h) return;
      barrier_sync(h_barrier(group), kStoringThreads);
      if (lane == 0) copy_h<kWalk>(p, work, group, chunk, memory.h(group));
    };
    if constexpr (kWalk == Walk::kForward) start_h();
    const int buffer = (before + i) % 2;
    barrier_sync(o_barrier(group, buffer), kStoringThreads);
    using Units = OUnits<Io>;
    const Units units(p, work, group, chunk, lane);
    uint4 x[Units::kRows];
    units.load(x, memory.o(group, buffer));
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&barriers.o_free[group][buffer]);
    units.store(x, rows_of(work, chunk));
    if constexpr (kWalk != Walk::kForward) start_h();
    if (with_h && lane == 0) {
      ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>{});
      ptx::mbarrier_arrive(&barriers.h_free[group]);
    }
    __syncwarp();
  }
  // Until they have written, too: the block may walk again.
  if (lane == 0) ptx::cp_async_bulk_wait_group(ptx::n32_t<0>{});
  __syncwarp();
}

}  // namespace kda::cuda::sm90
