// compose: the start of every segment of a sequence from the one before, in fp32,
//   start of p + 1 = transition of p . start of p + what the tokens of p left,
// p = 1 .. in order; `starts` holds the last term and receives the result. The start of segment 1
// is there already.
//
// Grid: one block a (sequence, value head, tile of columns of V), tiles fastest, so that the blocks
// of a head share its transitions in L2. A tile is some groups of 8 columns, which does not change
// a bit: few for little latency, more for less traffic (compose_groups in config.h).
//
// Threads: 2 K. Part w of kComposeParts sums its K / 8 rows j of the transition for each group,
// four k and eight columns a thread; the rows of the next segment are in flight meanwhile, in
// registers. Then each thread adds the parts of four elements, in order, to what the tokens left.
//
// Shared memory, bytes, K = 128: the parts 2 x [8][8][K] 65536; the start [8][K] of each group
// 4096. Barriers: the block's, between parts and start, and at the end of a segment.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/sm90/chunk_fwd/chunk_fwd.h"
#include "cuda/sm90/chunk_fwd/config.h"
#include "cuda/sm90/chunk_fwd/segments.cuh"

namespace kda::cuda::sm90 {

template <int K>
inline constexpr int kComposeThreads = K / 4 * kComposeParts;

template <int K>
struct ComposeShared {
  float parts[2][kComposeParts][kComposeColumns][K];  ///< in turns
  float start[1][kComposeColumns][K];                 ///< one a group

  static constexpr std::size_t bytes(int groups) {
    return sizeof(parts) + static_cast<std::size_t>(groups) * sizeof(start);
  }
};

/// The rows of one transition that a thread multiplies by.
template <int K>
struct TransitionPart {
  static constexpr int kRows = K / kComposeParts;
  float4 rows[kRows];

  /// from: element (j, k) = (0, 4 lane) of the part. No read-only loads: these the compiler moves
  /// behind barriers, to their use.
  __device__ __forceinline__ void load(const float* from) {
#pragma unroll
    for (int j = 0; j < kRows; ++j) rows[j] = *reinterpret_cast<const float4*>(from + j * K);
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
  extern __shared__ __align__(16) unsigned char dynamic[];
  auto& shared = *reinterpret_cast<ComposeShared<K>*>(dynamic);
  cudaTriggerProgrammaticLaunchCompletion();
  const int64_t tiles = p.heads.V / (p.groups * kComposeColumns);
  const int64_t head = blockIdx.x / tiles;
  const int64_t hv = head % p.heads.HV;
  const int64_t sequence = head / p.heads.HV;
  const TokenRange range = tokens_of(p.sequences, sequence);
  const int64_t first = first_segment(p.sequences, p.segment, sequence);
  const int64_t last = first + chunks_in(range.end - range.begin, p.segment) - 1;
  cudaGridDependencySynchronize();  // before any block ends: what follows waits for this launch
  if (last < first + 2) return;

  const int part = static_cast<int>(threadIdx.x) / (K / 4);
  const int quad = static_cast<int>(threadIdx.x) % (K / 4) * 4;
  // The four elements that this thread adds up are of column `part` of a group.
  static_assert(kComposeParts == kComposeColumns);
  const int64_t column = blockIdx.x % tiles * p.groups * kComposeColumns + part;
  const auto own = [&](int64_t row, int group) {
    return reinterpret_cast<float4*>(static_cast<float*>(p.starts.data) + row * p.starts.stride[0] +
                                     hv * p.starts.stride[1] +
                                     (column + group * kComposeColumns) * K + quad);
  };
  const auto transition = [&](int64_t row) {
    return static_cast<const float*>(p.transitions.data) + row * p.transitions.stride[0] +
           hv * p.transitions.stride[1] + part * TransitionPart<K>::kRows * K + quad;
  };
  const auto start = [&](int group) -> float4& {
    return *reinterpret_cast<float4*>(&shared.start[group][part][quad]);
  };

  for (int group = 0; group < p.groups; ++group) start(group) = *own(first + 1, group);
  TransitionPart<K> next;
  next.load(transition(first + 1));
  __syncthreads();
  for (int64_t row = first + 1; row < last; ++row) {
    const TransitionPart<K> now = next;
    if (row + 1 < last) next.load(transition(row + 1));
    for (int group = 0; group < p.groups; ++group) {
      auto& parts = shared.parts[group % 2];
      float4 x = *own(row + 1, group);
      float sum[kComposeColumns][4];
      now.multiply(sum, shared.start[group], part * TransitionPart<K>::kRows);
#pragma unroll
      for (int v = 0; v < kComposeColumns; ++v) {
        *reinterpret_cast<float4*>(&parts[part][v][quad]) = {sum[v][0], sum[v][1], sum[v][2],
                                                             sum[v][3]};
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kComposeParts; ++i) {
        const float4 y = *reinterpret_cast<const float4*>(&parts[i][part][quad]);
        x.x += y.x;
        x.y += y.y;
        x.z += y.z;
        x.w += y.w;
      }
      start(group) = x;
      *own(row + 1, group) = x;
    }
    __syncthreads();
  }
}

}  // namespace kda::cuda::sm90
