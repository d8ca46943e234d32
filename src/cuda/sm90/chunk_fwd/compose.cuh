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
// Shared memory, bytes, K = 128: the start [K][8] 4096, the parts [8][K][8] 32768.
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
  float start[K][kComposeColumns];
  float parts[kComposeParts][K][kComposeColumns];
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

  __device__ __forceinline__ void multiply(float (&sum)[4][kComposeColumns],
                                           const float (*start)[kComposeColumns]) const {
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const float phi[4] = {rows[j].x, rows[j].y, rows[j].z, rows[j].w};
#pragma unroll
      for (int v = 0; v < kComposeColumns; ++v) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          sum[k][v] = j == 0 ? phi[k] * start[j][v] : fmaf(phi[k], start[j][v], sum[k][v]);
        }
      }
    }
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
  const int own_k = thread / 2;  // of the four elements that this thread adds up
  const int own_v = thread % 2 * 4;
  const auto own = [&](int64_t row) {
    return reinterpret_cast<float4*>(static_cast<float*>(p.starts.data) + row * p.starts.stride[0] +
                                     hv * p.starts.stride[1] + own_k * p.starts.stride[2] +
                                     blockIdx.x % tiles * kComposeColumns + own_v);
  };
  const auto transition = [&](int64_t row) {
    return static_cast<const float*>(p.transitions.data) + row * p.transitions.stride[0] +
           hv * p.transitions.stride[1] + part * TransitionPart<K>::kRows * K + quad;
  };

  *reinterpret_cast<float4*>(&shared.start[own_k][own_v]) = *own(first + 1);
  TransitionPart<K> next;
  next.load(transition(first + 1));
  __syncthreads();
  for (int64_t row = first + 1; row < last; ++row) {
    const TransitionPart<K> now = next;
    if (row + 1 < last) next.load(transition(row + 1));
    float4 x = *own(row + 1);
    float sum[4][kComposeColumns];
    now.multiply(sum, shared.start + part * TransitionPart<K>::kRows);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int v = 0; v < kComposeColumns; v += 4) {
        *reinterpret_cast<float4*>(&shared.parts[part][quad + k][v]) = {
            sum[k][v], sum[k][v + 1], sum[k][v + 2], sum[k][v + 3]};
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kComposeParts; ++i) {
      const float4 y = *reinterpret_cast<const float4*>(&shared.parts[i][own_k][own_v]);
      x.x += y.x;
      x.y += y.y;
      x.z += y.z;
      x.w += y.w;
    }
    *reinterpret_cast<float4*>(&shared.start[own_k][own_v]) = x;
    *own(row + 1) = x;
    __syncthreads();
  }
}

}  // namespace kda::cuda::sm90
