// compose: the start of every segment of a sequence from the one before, in fp32,
//   start of p + 1 = transition of p . start of p + what the tokens of p left,
// p = 1 .. in order; `starts` holds the last term and receives the result. The start of segment 1
// is there already.
//
// Grid: one block a (sequence, value head, kComposeColumns columns of V), columns fastest, so that
// the blocks of a head share its transitions in L2.
//
// Threads: 2 K. Part w of kComposeParts sums its K / 8 rows j of the transition, four k and all
// columns a thread; the rows of the next segment are in flight meanwhile, in registers. Then each
// thread adds the parts of four elements, in order, to what the tokens left.
//
// Shared memory, bytes, K = 128: the start [8][K] 4096, the parts [8][8][K] 32768.
// Barriers: the block's, between start and parts, and between parts and start.
#pragma once

#include <cstdint>

#include "cuda/sm90/chunk_fwd/chunk_fwd.h"
#include "cuda/sm90/chunk_fwd/config.h"
#include "cuda/sm90/chunk_fwd/segments.cuh"

namespace kda::cuda::sm90 {

template <int K>
inline constexpr int kComposeThreads = K / 4 * kComposeParts;

template <int K>
struct ComposeShared {
  float start[kComposeColumns][K];
  float parts[kComposeParts][kComposeColumns][K];
};

/// The rows of one transition that a thread multiplies by.
template <int K>
struct TransitionPart {
  static constexpr int kRows = K / kComposeParts;
  float4 rows[kRows];

  /// from: element (j, k) = (0, 4 lane) of the part.
  __device__ __forceinline__ void load(const float* from) {
#pragma unroll
    for (int j = 0; j < kRows; ++j) rows[j] = __ldg(reinterpret_cast<const float4*>(from + j * K));
  }

  /// sum[v][k] of four k; start: from this part's first j on.
  __device__ __forceinline__ void multiply(float (&sum)[kComposeColumns][4],
                                           const float (*start)[K], int first) const {
#pragma unroll
    for (int j = 0; j < kRows; j += 4) {
#pragma unroll
      for (int v = 0; v < kComposeColumns; ++v) {
        const float4 x = *reinterpret_cast<const float4*>(&start[v][first + j]);
        add(sum[v], rows[j], x.x, j == 0);
        add(sum[v], rows[j + 1], x.y, false);
        add(sum[v], rows[j + 2], x.z, false);
        add(sum[v], rows[j + 3], x.w, false);
      }
    }
  }

 private:
  static __device__ __forceinline__ void add(float (&sum)[4], const float4& phi, float x,
                                             bool is_first) {
    sum[0] = is_first ? phi.x * x : fmaf(phi.x, x, sum[0]);
    sum[1] = is_first ? phi.y * x : fmaf(phi.y, x, sum[1]);
    sum[2] = is_first ? phi.z * x : fmaf(phi.z, x, sum[2]);
    sum[3] = is_first ? phi.w * x : fmaf(phi.w, x, sum[3]);
  }
};

template <int K>
__global__ void __launch_bounds__(kComposeThreads<K>)
    sm90_chunk_fwd_compose(const __grid_constant__ ComposeParams p) {
  __shared__ __align__(16) ComposeShared<K> shared;
  const int64_t tiles = p.heads.V / kComposeColumns;
  const int64_t head = blockIdx.x / tiles;
  const int64_t hv = head % p.heads.HV;
  const int64_t sequence = head / p.heads.HV;
  const TokenRange range = tokens_of(p.sequences, sequence);
  const int64_t first = first_segment(p.sequences, p.segment, sequence);
  const int64_t last = first + chunks_in(range.end - range.begin, p.segment) - 1;
  if (last < first + 2) return;

  const int thread = static_cast<int>(threadIdx.x);
  const int part = thread / (K / 4);
  const int quad = thread % (K / 4) * 4;
  // The four elements that this thread adds up are of column `part`.
  static_assert(kComposeParts == kComposeColumns);
  const auto own = [&](int64_t row) {
    return reinterpret_cast<float4*>(static_cast<float*>(p.starts.data) + row * p.starts.stride[0] +
                                     hv * p.starts.stride[1] +
                                     (blockIdx.x % tiles * kComposeColumns + part) * K + quad);
  };
  const auto transition = [&](int64_t row) {
    return static_cast<const float*>(p.transitions.data) + row * p.transitions.stride[0] +
           hv * p.transitions.stride[1] + part * TransitionPart<K>::kRows * K + quad;
  };

  *reinterpret_cast<float4*>(&shared.start[part][quad]) = *own(first + 1);
  TransitionPart<K> next;
  next.load(transition(first + 1));
  __syncthreads();
  for (int64_t row = first + 1; row < last; ++row) {
    const TransitionPart<K> now = next;
    if (row + 1 < last) next.load(transition(row + 1));
    float4 x = *own(row + 1);
    float sum[kComposeColumns][4];
    now.multiply(sum, shared.start, part * TransitionPart<K>::kRows);
#pragma unroll
    for (int v = 0; v < kComposeColumns; ++v) {
      *reinterpret_cast<float4*>(&shared.parts[part][v][quad]) = {sum[v][0], sum[v][1], sum[v][2],
                                                                  sum[v][3]};
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kComposeParts; ++i) {
      const float4 y = *reinterpret_cast<const float4*>(&shared.parts[i][part][quad]);
      x.x += y.x;
      x.y += y.y;
      x.z += y.z;
      x.w += y.w;
    }
    *reinterpret_cast<float4*>(&shared.start[part][quad]) = x;
    *own(row + 1) = x;
    __syncthreads();
  }
}

}  // namespace kda::cuda::sm90
