// From tiles to tokens: which rows a chunk has, which chunks a sequence has.
#pragma once

#include "cuda/tile/convert.cuh"

namespace kda::cuda {

struct Chunk {
  int64_t batch;
  int64_t begin;  ///< first token in its batch row
  int32_t rows;   ///< valid rows, 0 if the chunk row is unused
};

struct TokenRange {
  int64_t batch;
  int64_t begin;
  int64_t end;
  int64_t first_chunk;  ///< row of h and dh
  int64_t chunks;
};

__device__ __forceinline__ int64_t clamp_index(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : (x > high ? high : x);
}

/// Entry i of cu_seqlens, forced into 0..T.
__device__ __forceinline__ int64_t token_start(const Sequences& s, int64_t i) {
  return clamp_index(load_index(s.cu, i), 0, s.T);
}

__device__ __forceinline__ int64_t chunks_in(int64_t tokens, int32_t C) {
  return (tokens + C - 1) / C;
}

/// Tokens that belong to a sequence; those from here on are padding.
__device__ __forceinline__ int64_t used_tokens(const Sequences& s) {
  return s.cu.data ? token_start(s, s.count) : s.T;
}

/// Rows of h and dh that belong to a chunk.
__device__ __forceinline__ int64_t used_chunks(const Sequences& s) {
  if (!s.cu.data) return s.chunk_rows;
  return clamp_index(s.offsets[s.count], 0, s.chunk_rows);
}

__device__ __forceinline__ Chunk chunk_of(const Sequences& s, int64_t row) {
  if (s.cu.data) {
    const ChunkEntry entry = s.entries[row];
    return {0, entry.begin, static_cast<int32_t>(entry.rows)};
  }
  const int64_t batch = row / s.chunks_per_row;
  const int64_t begin = (row - batch * s.chunks_per_row) * s.C;
  const int64_t rest = s.T - begin;
  return {batch, begin, static_cast<int32_t>(rest < s.C ? rest : s.C)};
}

/// Tokens of a sequence, without its chunks.
__device__ __forceinline__ TokenRange tokens_of(const Sequences& s, int64_t i) {
  if (!s.cu.data) return {i, 0, s.T, i * s.chunks_per_row, s.chunks_per_row};
  const int64_t begin = token_start(s, i);
  return {0, begin, clamp_index(token_start(s, i + 1), begin, s.T), 0, 0};
}

/// Tokens and chunks of a sequence; reads the table of packed problems.
__device__ __forceinline__ TokenRange chunks_of(const Sequences& s, int64_t i) {
  TokenRange range = tokens_of(s, i);
  if (!s.cu.data) return range;
  range.first_chunk = clamp_index(s.offsets[i], 0, s.chunk_rows);
  range.chunks = chunks_in(range.end - range.begin, s.C);
  if (range.chunks > s.chunk_rows - range.first_chunk) {
    range.chunks = s.chunk_rows - range.first_chunk;
  }
  return range;
}

/// Offset of element (batch, token, head, 0) of a tensor [B, T, heads, ...].
__device__ __forceinline__ int64_t token_offset(const Tensor& t, int64_t batch, int64_t token,
                                                int64_t head) {
  return batch * t.stride[0] + token * t.stride[1] + head * t.stride[2];
}

}  // namespace kda::cuda
