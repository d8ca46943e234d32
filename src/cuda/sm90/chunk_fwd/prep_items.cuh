// Which chunks and value heads a block of prep takes, and the copies of their inputs.
#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "cuda/sm90/chunk_fwd/prep_shared.cuh"

namespace kda::cuda::sm90 {

/// The chunk, its row and the value head of a number: first chunks of all sequences first, heads
/// fastest; rows of the chunk table for packed sequences.
struct PrepPlace {
  Chunk chunk;
  uint32_t row;
  uint32_t hv;
};
__device__ __forceinline__ PrepPlace place_of(const Sequences& s, uint32_t heads, uint32_t number) {
  PrepPlace place;
  place.row = number / heads;
  place.hv = number - place.row * heads;
  if (s.cu.data) {
    place.chunk = chunk_of(s, place.row);
    return place;
  }
  const auto batches = static_cast<uint32_t>(s.count);
  const uint32_t chunk = place.row / batches;
  const uint32_t batch = place.row - chunk * batches;
  place.row = batch * static_cast<uint32_t>(s.chunks_per_row) + chunk;
  place.chunk.batch = batch;
  place.chunk.begin = int64_t{chunk} * kChunk;
  const int64_t rest = s.T - place.chunk.begin;
  place.chunk.rows = static_cast<int32_t>(rest < kChunk ? rest : kChunk);
  return place;
}

/// q, k, g, beta.
__device__ __forceinline__ const Tensor& input_of(const PrepParams& p, int input) {
  return input == 0 ? p.q : (input == 1 ? p.k : (input == 2 ? p.gate.g : p.beta));
}

__device__ __forceinline__ uint32_t count_of(const PrepParams& p) {
  return static_cast<uint32_t>(p.sequences.chunk_rows) * static_cast<uint32_t>(p.heads.HV);
}

/// The number that a block works on after `number`: in steps of the grid, or, beside a scan, the
/// first that no block has taken. One warp asks; a step is there at once.
__device__ __forceinline__ uint32_t number_after(const PrepParams& p, uint32_t number) {
  if (p.ready == nullptr) return number < count_of(p) ? number + gridDim.x : number;
  uint32_t ticket = 0;
  if (this_thread() % 32 == 0) ticket = atomicAdd(p.counters + kPrepTickets, 1);
  return ticket;
}

/// The item of a number, or the first one after it in the block's walk that has rows; rows == 0:
/// there is none. One warp finds it for all, an input a lane. Afterwards `number` is the next one.
__device__ __forceinline__ void find_item(PrepItem& item, const PrepParams& p, uint32_t& number) {
  const int lane = this_thread() % 32;
  const auto heads = static_cast<uint32_t>(p.heads.HV);
  int32_t rows = 0;
  while (rows == 0) {
    const uint32_t found = __shfl_sync(~0u, number, 0);
    if (found >= count_of(p)) break;
    number = number_after(p, found);
    const PrepPlace at = place_of(p.sequences, heads, found);
    rows = at.chunk.rows;
    if (rows == 0) continue;
    const uint32_t head = lane < 2 ? at.hv / static_cast<uint32_t>(p.heads.group) : at.hv;
    if (lane < 4) {
      item.offset[lane] = token_offset(input_of(p, lane), at.chunk.batch, at.chunk.begin, head);
    }
    if (lane == 0) {
      item.hv = at.hv;
      item.record = at.row * heads + at.hv;
    }
  }
  if (lane == 0) item.rows = rows;
}

/// Whether this block stays where a scan needs room; lets the next launch start. A block that
/// leaves waits until all have started: what comes after it to its SM has to be the scan. But not
/// for ever, for where not all blocks fit it takes the place of one.
__device__ __forceinline__ bool stays(const PrepParams& p) {
  constexpr int64_t kMostCycles = 100'000;
  bool leaves = false;
  if (this_thread() == 0) {
    cudaGridDependencySynchronize();  // flags and counters are cleared
    uint32_t* const counters = p.counters;
    const uint32_t started = atomicAdd(counters + kPrepStarted, 1) + 1;
    uint32_t sm;
    asm("mov.u32 %0, %%smid;" : "=r"(sm));
    leaves = sm < static_cast<uint32_t>(p.room.sms) &&
             atomicAdd(counters + kPrepLeft, 1) < static_cast<uint32_t>(p.room.leaving);
    if (leaves && started < gridDim.x) {
      const int64_t start = clock64();
      while (*static_cast<volatile uint32_t*>(counters + kPrepStarted) < gridDim.x &&
             clock64() - start < kMostCycles) {
      }
    }
  }
  if (__syncthreads_or(leaves)) return false;
  cudaTriggerProgrammaticLaunchCompletion();
  return true;
}

/// What a scan waits for is the first records, which all blocks of an SM at once are slow to make:
/// they begin one after the other. All lanes of a warp; number: lane 0's first one.
__device__ __forceinline__ void wait_for_turn(const PrepParams& p, uint32_t number) {
  constexpr int64_t kCycles = 4000;
  if (p.room.at_once == 0) return;
  const uint32_t turn = __shfl_sync(~0u, number, 0) / static_cast<uint32_t>(p.room.at_once);
  const int64_t end = clock64() + turn * kCycles;
  while (clock64() < end) __nanosleep(200);
}

__device__ __forceinline__ bool is_wide(const Tensor& t) {
  return t.dtype != kBFloat16 && t.dtype != kFloat16;
}

/// The warp's rows, of kBytes each, to shared memory; zeros from `rows` on. kOnce: where records
/// are to stay in L2. Where they come back from memory the choice alone made S1 1 % slower.
template <int kBytes, bool kOnce>
__device__ __forceinline__ void copy_rows(unsigned char* shared, int shared_stride,
                                          const std::byte* from, int64_t stride, int rows) {
  constexpr int kPieces = kBytes / 16;
  constexpr int kAtOnce = 32 / kPieces;
  const int lane = this_thread() % 32;
  const int row = lane / kPieces;
  auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared)) +
            static_cast<uint32_t>(row * shared_stride + lane % kPieces * 16);
  const std::byte* piece = from + row * stride + lane % kPieces * 16;
  if (rows >= 8) {
#pragma unroll
    for (int i = 0; i < 8; i += kAtOnce) {
      const uint32_t place = to + static_cast<uint32_t>(i * shared_stride);
      if constexpr (kOnce) {
        copy_async_16_once(place, piece);
      } else {
        copy_async_16(place, piece);
      }
      piece += kAtOnce * stride;
    }
  } else {
    for (int i = 0; i < 8; i += kAtOnce) {
      const bool valid = row + i < rows;
      copy_async_16_or_zero(to + static_cast<uint32_t>(i * shared_stride), valid ? piece : from,
                            valid);
      piece += kAtOnce * stride;
    }
  }
}

/// Where a row of q, k or g begins in memory.
__device__ __forceinline__ const std::byte* row_start(const PrepParams& p, const PrepItem& item,
                                                      int input, int row) {
  const Tensor& t = input_of(p, input);
  return static_cast<const std::byte*>(t.data) +
         (item.offset[input] + row * t.stride[1]) * (is_wide(t) ? 4 : 2);
}

}  // namespace kda::cuda::sm90
