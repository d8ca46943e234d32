// Which chunks and value heads a block of prep takes, and the copies of their inputs.
#pragma once

#include "cuda/ptx/bulk_copy.cuh"
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

/// The item of a number, or the first one after it in the block's steps that has rows; rows == 0:
/// there is none. One warp finds it for all, an input a lane.
__device__ __forceinline__ void find_item(PrepItem& item, const PrepParams& p, uint64_t number) {
  const int lane = this_thread() % 32;
  const auto heads = static_cast<uint32_t>(p.heads.HV);
  int32_t rows = 0;
  for (; number < static_cast<uint64_t>(p.sequences.chunk_rows) * heads; number += gridDim.x) {
    const PrepPlace at = place_of(p.sequences, heads, static_cast<uint32_t>(number));
    rows = at.chunk.rows;
    if (rows == 0) continue;
    const uint32_t head = lane < 2 ? at.hv / static_cast<uint32_t>(p.heads.group) : at.hv;
    if (lane < 4) {
      item.offset[lane] = token_offset(input_of(p, lane), at.chunk.batch, at.chunk.begin, head);
    }
    if (lane == 0) {
      item.number = static_cast<uint32_t>(number);
      item.hv = at.hv;
      item.record = at.row * heads + at.hv;
    }
    break;
  }
  if (lane == 0) item.rows = rows;
}

/// Clears the flags of this block's items.
__device__ __forceinline__ void clear_ready(const PrepParams& p) {
  const auto heads = static_cast<uint32_t>(p.heads.HV);
  const uint64_t count = static_cast<uint64_t>(p.sequences.chunk_rows) * heads;
  for (uint64_t number = blockIdx.x + uint64_t{threadIdx.x} * gridDim.x; number < count;
       number += uint64_t{kPrepThreads} * gridDim.x) {
    const PrepPlace at = place_of(p.sequences, heads, static_cast<uint32_t>(number));
    p.ready[at.row * heads + at.hv] = 0;
  }
  __threadfence();
  __syncthreads();
}

__device__ __forceinline__ bool is_wide(const Tensor& t) {
  return t.dtype != kBFloat16 && t.dtype != kFloat16;
}

/// The warp's rows, of kBytes each, to shared memory; zeros from `rows` on.
template <int kBytes>
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
      copy_async_16(to + static_cast<uint32_t>(i * shared_stride), piece);
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
