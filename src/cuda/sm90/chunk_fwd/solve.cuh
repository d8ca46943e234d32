// The solve of prep: one warp turns N = -L into (I + L)^-1 - I in the record.
#pragma once

#include "cuda/sm90/chunk_fwd/scores.cuh"

namespace kda::cuda::sm90 {

/// Inverts the diagonal blocks of I - N by fp32 forward substitution, which has no range to exceed,
/// and leaves them in N, transposed back. Lane j owns column j % 16 of block j / 16. NaN if an
/// element of the lane's column is not finite, else 0.
__device__ __forceinline__ float invert_blocks(float (&N)[kChunk][kScoreStride]) {
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
  float nothing = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) nothing = fmaf(x[i], 0.f, nothing);
  return nothing;
}

/// The same of the lane's part of the block below the diagonal.
__device__ __forceinline__ float add_block_below(float nothing,
                                                 const float (&N)[kChunk][kScoreStride]) {
  const int lane = this_thread() % 32;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const float4 n =
        *reinterpret_cast<const float4*>(&N[kBlock + lane / 2][lane % 2 * 8 + 4 * part]);
    nothing = fmaf(n.x, 0.f, nothing);
    nothing = fmaf(n.y, 0.f, nothing);
    nothing = fmaf(n.z, 0.f, nothing);
    nothing = fmaf(n.w, 0.f, nothing);
  }
  return nothing;
}

/// Where k, a gate or beta of a token is not finite, its row of N is not, nor are later rows of the
/// inverse. Earlier tokens meet them in products with 0, here and in scan. So from the first such
/// row on the inverse, k 2^G and beta become 0, scores NaN, and NaN enters the state: o is NaN from
/// that token on, and no bit changes before it.
template <class Io, int K>
__device__ void contain(PrepShared<Io, K>& shared, float* beta, uint64_t record) {
  using R = Record<K>;
  constexpr uint32_t kNaNs = 0x7fff7fff;  // two of either 16-bit type
  constexpr Words<4> kZeroUnit{};
  constexpr Words<4> kNaNUnit{kNaNs, kNaNs, kNaNs, kNaNs};
  auto& N = shared.N;
  const int lane = this_thread() % 32;
  bool finite = true;
  for (int j = 0; j <= lane; ++j) finite = finite && N[lane][j] * 0.f == 0.f;
  const uint32_t rows = __ballot_sync(~0u, !finite);
  if (rows == 0) return;
  const int first = __ffs(static_cast<int>(rows)) - 1;
  if (lane >= first) {
    for (int j = 0; j < kChunk; ++j) N[lane][j] = 0;
    beta[lane] = 0;
  }
  const auto unit = static_cast<uint32_t>(lane % 8 * 16);
  const auto panel = static_cast<uint32_t>(lane / 8 * kChunk * kPanelRowBytes);
  for (int row = first; row < kChunk; ++row) {
    const auto line = static_cast<uint32_t>(row * kPanelRowBytes);
    if (lane < K / 8) store_global(record + R::kRead + 2 * panel + line + unit, kZeroUnit);
    if (lane < 4) {
      store_global(record + static_cast<uint32_t>(R::kScores + row * 64 + lane * 16), kNaNUnit);
    }
  }
  if (lane < K / 8) {
    store_global(record + static_cast<uint32_t>(R::kUpdate + first * kPanelRowBytes) + panel + unit,
                 kNaNUnit);
  }
  __syncwarp();
}

/// What rounding to tf32 leaves of x.
__device__ __forceinline__ float2 rest_of_tf32(float2 x) {
  return {x.x - __uint_as_float(tf32_of(x.x)), x.y - __uint_as_float(tf32_of(x.y))};
}

/// d = a b for 16 x 16 blocks; A(i, c): the column pair c of row i, B(c, j): rows c, c + 1. In
/// tf32, whose rounding is that of fp16: there the operands are sums of two numbers, but for the
/// product of both rests.
template <class Io, class A, class B>
__device__ __forceinline__ void multiply_blocks(float (&d)[2][4], A a, B b) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 upper = a(step, 0);
      const float2 lower = a(step, 1);
      const float2 column = b(step, n);
      if constexpr (!kIsBf16<Io>) {
        add_step(d[n], rest_of_tf32(upper), rest_of_tf32(lower), column);
        add_step(d[n], upper, lower, rest_of_tf32(column));
      }
      add_step(d[n], upper, lower, column);
    }
  }
}

/// (I + L)^-1 - I, whose block below the diagonal is A22 N21 A11, and beta. The diagonal would be
/// exact in 16 bits, too; scan adds it in fp32, to what the product rounds.
template <class Io, int K>
__device__ __forceinline__ void write_solve(PrepShared<Io, K>& shared, float* beta, uint64_t record,
                                            bool contains) {
  auto& N = shared.N;
  const float nothing = add_block_below(invert_blocks(N), N);
  if (contains && __any_sync(~0u, nothing != 0)) contain(shared, beta, record);
  const int lane = this_thread() % 32;
  const int g = lane / 4;
  const int c = 2 * (lane % 4);
  store_global(record + static_cast<uint32_t>(Record<K>::kBeta + 4 * lane),
               Words<1>{__float_as_uint(beta[lane])});
  float z[2][4] = {};
  multiply_blocks<Io>(
      z, [&](int step, int half) { return pair_at(N[16 + 8 * half + g], 16 + 8 * step + c); },
      [&](int step, int n) -> float2 {
        return {N[16 + 8 * step + c][8 * n + g], N[17 + 8 * step + c][8 * n + g]};
      });
  float x[2][4] = {};
  multiply_blocks<Io>(
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
#pragma unroll
    for (int i = j / 2 * 2; i < 4; ++i) {
      float2 y = i / 2 == j / 2 ? pair_at(N[8 * i + g], column)
                                : float2{x[j][i % 2 * 2], x[j][i % 2 * 2 + 1]};
      if (i == j && g == c) y.x = 0;
      if (i == j && g == c + 1) y.y = 0;
      store_global(fragments.at(i, j), Words<1>{pack<Io>(y.x, y.y)});
    }
  }
}

}  // namespace kda::cuda::sm90
