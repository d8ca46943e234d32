// Which rows the segments of a sequence have among those of all (config.h), found without a table.
#pragma once

#include "cuda/sm90/chunk_fwd/config.h"
#include "cuda/tile/sequence.cuh"

namespace kda::cuda::sm90 {

__device__ __forceinline__ int64_t first_segment(const Sequences& s, int32_t tokens, int64_t i) {
  return s.cu.data ? token_start(s, i) / tokens + i : i * chunks_in(s.T, tokens);
}

__device__ __forceinline__ int64_t sequence_of_segment(const Sequences& s, int32_t tokens,
                                                       int64_t row) {
  if (!s.cu.data) return row / chunks_in(s.T, tokens);
  int64_t low = 0;  // first_segment(low) <= row < first_segment(high)
  int64_t high = s.count;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (first_segment(s, tokens, middle) <= row ? low : high) = middle;
  }
  return low;
}

struct SegmentOf {
  int64_t row = 0;
  int64_t index = 0;  ///< in its sequence
  bool exists = true;
  bool is_last = true;
};

/// Narrows a sequence's range to that of the segment of a row. A sequence has a first segment even
/// if it has no tokens.
__device__ __forceinline__ SegmentOf cut_segment(const Sequences& s, int32_t tokens,
                                                 int64_t sequence, int64_t row, TokenRange& range) {
  const int64_t chunks = tokens / kChunk;
  SegmentOf segment{row, row - first_segment(s, tokens, sequence)};
  const int64_t skipped = segment.index * chunks;
  segment.exists = segment.index == 0 || (segment.index > 0 && skipped < range.chunks);
  segment.is_last = skipped + chunks >= range.chunks;
  range.first_chunk += skipped;
  range.begin += segment.index * tokens;
  if (!segment.is_last) range.end = range.begin + tokens;
  range.chunks = segment.is_last ? range.chunks - skipped : chunks;
  return segment;
}

}  // namespace kda::cuda::sm90
