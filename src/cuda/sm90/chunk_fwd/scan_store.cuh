// From the staging of scan to memory: tiles of o and h, and the warps that store them.
#pragma once

#include <cuda/ptx>

#include "cuda/ptx/barrier.cuh"
#include "cuda/sm90/chunk_fwd/scan_load.cuh"

namespace kda::cuda::sm90 {

/// Whether warps of their own store what the consumers leave in the staging. The forward alone:
/// with few heads its time is that of a consumer's instructions.
template <Walk kWalk>
inline constexpr bool kHasStoringWarps = kWalk == Walk::kForward;

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

/// Chunks of a row of h: the caller's chunks have 32 or 64 tokens.
__device__ __forceinline__ int h_shift(const ScanParams& p) {
  return p.chunk_size == 2 * kChunk ? 1 : 0;
}
/// Whether the state at a chunk is a row of h. h stands before the chunks of its row, dh behind
/// them.
template <Walk kWalk>
__device__ __forceinline__ bool has_h(const ScanParams& p, const ForwardWork& work, int32_t chunk) {
  if (p.h.data == nullptr) return false;
  const int last = (1 << h_shift(p)) - 1;
  if (kWalk != Walk::kReverse) return (chunk & last) == 0;
  return (chunk & last) == last || chunk + 1 == work.chunks;
}

/// Starts the copy of a tile of h; one thread.
__device__ __forceinline__ void copy_h(const ScanParams& p, const ForwardWork& work, int group,
                                       int32_t chunk, const unsigned char* staging) {
  const int32_t to[4] = {column_of(work, group), 0, static_cast<int32_t>(work.hv),
                         work.first_h + (chunk >> h_shift(p))};
  ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &p.h_map, to, staging);
  ptx::cp_async_bulk_commit_group();
}

/// Starts the copy of a tile of o, all of whose rows are the sequence's; one thread.
__device__ __forceinline__ void copy_o(const ScanParams& p, const ForwardWork& work, int group,
                                       int32_t chunk, const unsigned char* staging) {
  const int64_t token = work.range.begin + int64_t{chunk} * kChunk;
  const int32_t to[4] = {column_of(work, group), static_cast<int32_t>(work.hv),
                         static_cast<int32_t>(token), static_cast<int32_t>(work.range.batch)};
  ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &p.o_map, to, staging);
  ptx::cp_async_bulk_commit_group();
}

/// Units of 16 bytes of a tile of o, of which `Threads` threads take one each of some rows.
template <class Io, int Threads>
struct OUnits {
  static constexpr int kRowsAtOnce = Threads / 8;
  static constexpr int kRows = kChunk / kRowsAtOnce;  ///< of each thread

  Io* to;
  int64_t stride;
  int first_row;
  int unit;

  __device__ __forceinline__ OUnits(const ScanParams& p, const ForwardWork& work, int group,
                                    int32_t chunk, int thread)
      : stride(p.o.stride[1]), first_row(thread / 8), unit(thread % 8) {
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

/// Of a chunk whose other rows may be another sequence's, by the consumer's threads.
template <class Io>
__device__ __forceinline__ void store_rows(const ScanParams& p, const ForwardWork& work, int group,
                                           int32_t chunk, const unsigned char* staging, int rows,
                                           int thread) {
  using Units = OUnits<Io, 128>;
  const Units units(p, work, group, chunk, thread);
  uint4 x[Units::kRows];
  units.load(x, staging);
  units.store(x, rows);
}

/// The staging may be written, or go, once the copies that this thread started have read it.
__device__ __forceinline__ void wait_for_copies_to_read() {
  ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>{});
}

/// The storing warp of a consumer warpgroup. o passes through its registers: for a copy by TMA the
/// consumers would have to wait until their writes are visible to it. before: chunks of an earlier
/// walk.
template <class Io, int K, Walk kWalk>
__device__ void store_chunks(const ScanParams& p, const ForwardWork& work,
                             const ForwardMemory<K>& memory, ForwardBarriers& barriers, int group,
                             int32_t before) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int32_t chunk = 0; chunk < work.chunks; ++chunk) {
    const bool with_h = has_h<kWalk>(p, work, chunk);
    if (with_h) {
      barrier_sync(h_barrier(group), kStoringThreads);
      if (lane == 0) copy_h(p, work, group, chunk, memory.h(group));
    }
    const int buffer = (before + chunk) % 2;
    barrier_sync(o_barrier(group, buffer), kStoringThreads);
    using Units = OUnits<Io, 32>;
    const Units units(p, work, group, chunk, lane);
    uint4 x[Units::kRows];
    units.load(x, memory.o(group, buffer));
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&barriers.o_free[group][buffer]);
    units.store(x, rows_of(work, chunk));
    if (with_h && lane == 0) {
      wait_for_copies_to_read();
      ptx::mbarrier_arrive(&barriers.h_free[group]);
    }
    __syncwarp();
  }
  // Until they have written, too: the block may walk again.
  if (lane == 0) ptx::cp_async_bulk_wait_group(ptx::n32_t<0>{});
  __syncwarp();
}

}  // namespace kda::cuda::sm90
