// The solve of prep: one warp turns N = -L into (I + L)^-1 in the record.
#pragma once

#include "cuda/sm90/chunk_fwd/scores.cuh"

namespace kda::cuda::sm90 {

/// Inverts the diagonal blocks of I - N by fp32 forward substitution, which has no range to exceed,
/// and leaves them in N, transposed back. Lane j owns column j % 16 of block j / 16.
__device__ __forceinline__ void invert_blocks(float (&N)[kChunk][kScoreStride]) {
  const int lane = this_thread() % 32;
  const int first = lane & 16;
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = i == lane % 16 ? 1.f : 0.f;
#pragma unroll
  for (int j = 0; j < 15; ++j) {
    // Each row takes its terms in the order of j: 15 dependent products, not 120.
#pragma unroll
    for (int m = (j + 1) / 4 * 4; m < 16; m += 4) {
      const float4 n = *reinterpret_cast<const float4*>(&N[first + j][first + m]);
      if (m > j) x[m] = fmaf(n.x, x[j], x[m]);
      if (m + 1 > j) x[m + 1] = fmaf(n.y, x[j], x[m + 1]);
      if (m + 2 > j) x[m + 2] = fmaf(n.z, x[j], x[m + 2]);
      x[m + 3] = fmaf(n.w, x[j], x[m + 3]);
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16; ++i) N[first + i][lane] = i < lane % 16 ? 0.f : x[i];
  __syncwarp();
}

/// d = a b for 16 x 16 blocks; A(i, c): the column pair c of row i, B(c, j): rows c, c + 1.
template <class A, class B>
__device__ __forceinline__ void multiply_blocks(float (&d)[2][4], A a, B b) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 upper = a(step, 0);
      const float2 lower = a(step, 1);
      add_step(d[n], upper, lower, b(step, n));
    }
  }
}

/// (I + L)^-1, with diag(beta) unless that is split: the block below the diagonal is T22 N21 T11.
template <class Io, int K>
__device__ __forceinline__ void write_solve(PrepShared<Io, K>& shared, const float* beta,
                                            uint64_t record, bool split_beta) {
  auto& N = shared.N;
  invert_blocks(N);
  const int lane = this_thread() % 32;
  const int g = lane / 4;
  const int c = 2 * (lane % 4);
  if (split_beta) {
    store_global(record + static_cast<uint32_t>(Record<K>::kBeta + 4 * lane),
                 Words<1>{__float_as_uint(beta[lane])});
  }
  float z[2][4] = {};
  multiply_blocks(
      z, [&](int step, int half) { return pair_at(N[16 + 8 * half + g], 16 + 8 * step + c); },
      [&](int step, int n) -> float2 {
        return {N[16 + 8 * step + c][8 * n + g], N[17 + 8 * step + c][8 * n + g]};
      });
  float x[2][4] = {};
  multiply_blocks(
      x,
      [&](int step, int half) -> float2 {
        return {z[step][2 * half], z[step][2 * half + 1]};
      },
      [&](int step, int n) -> float2 {
        return {N[8 * step + c][8 * n + g], N[8 * step + c + 1][8 * n + g]};
      });
  const SquareFragments fragments(record + Record<K>::kSolve);
#pragma unroll
  for (int j = 0; j < 4; ++j) {  // fragments of 8 rows x 8 columns
    const int column = 8 * j + c;
    const float2 factor = split_beta ? float2{1, 1} : pair_at(beta, column);
#pragma unroll
    for (int i = j / 2 * 2; i < 4; ++i) {
      const float2 y = i / 2 == j / 2 ? pair_at(N[8 * i + g], column)
                                      : float2{x[j][i % 2 * 2], x[j][i % 2 * 2 + 1]};
      store_global(fragments.at(i, j), Words<1>{pack<Io>(y.x * factor.x, y.y * factor.y)});
    }
  }
}

}  // namespace kda::cuda::sm90
