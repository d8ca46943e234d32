// Gates of a chunk in registers: a thread has some column pairs of some consecutive tokens.
#pragma once

#include "cuda/sm90/chunk_fwd/config.h"
#include "cuda/tile/fast_gate.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/sequence.cuh"

namespace kda::cuda::sm90 {

inline constexpr int32_t kBFloat16 = 1;  ///< values of kda::DType
inline constexpr int32_t kFloat16 = 2;

/// chunk_of for a grid's worth of chunks, without 64-bit division.
__device__ __forceinline__ Chunk small_chunk_of(const Sequences& s, uint32_t row) {
  if (s.cu.data) return chunk_of(s, row);
  const auto per_row = static_cast<uint32_t>(s.chunks_per_row);
  const uint32_t batch = row / per_row;
  const int64_t begin = int64_t{row - batch * per_row} * kChunk;
  const int64_t rest = s.T - begin;
  return {batch, begin, static_cast<int32_t>(rest < kChunk ? rest : kChunk)};
}

/// threadIdx.x, asked for anew: what follows from it is computed where it is used, not kept in
/// registers across a loop.
__device__ __forceinline__ int this_thread() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

struct PrepRow {
  uint32_t row;  ///< of the chunk
  uint32_t hv;
};

/// The chunk row and value head of an item: first chunks of all sequences first, heads fastest;
/// rows of the chunk table for packed sequences.
__device__ __forceinline__ PrepRow row_of(const Sequences& s, uint32_t heads, uint32_t number) {
  const uint32_t row = number / heads;
  const uint32_t hv = number - row * heads;
  if (s.cu.data) return {row, hv};
  const auto batches = static_cast<uint32_t>(s.count);
  const uint32_t chunk = row / batches;
  return {(row - chunk * batches) * static_cast<uint32_t>(s.chunks_per_row) + chunk, hv};
}

/// N words, aligned together: one access.
template <int N>
struct alignas(4 * N) Words {
  uint32_t word[N];
};

__device__ __forceinline__ bool is_wide(const Tensor& t) {
  return t.dtype != kBFloat16 && t.dtype != kFloat16;
}

/// Tokens first .. of columns column .., [pair][token], zeros from `rows` on. offset: of the
/// chunk's first element.
template <int TOKENS, int PAIRS>
__device__ __forceinline__ void load_gates(float2 (&z)[PAIRS][TOKENS], const Tensor& g,
                                           int64_t offset, int rows, int first, int column) {
  offset += first * g.stride[1] + column;
  const auto load_as = [&]<class W>(const void* start, W, auto unpack_word) {
    const auto* data =
        static_cast<const unsigned char*>(start) + offset * (sizeof(W) / (2 * PAIRS));
    W words[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t, data += g.stride[1] * (sizeof(W) / (2 * PAIRS))) {
      words[t] = {};
      if (first + t < rows) words[t] = *reinterpret_cast<const W*>(data);
    }
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) z[i][t] = unpack_word(words[t], i);
    }
  };
  if (g.dtype == kBFloat16) {
    load_as(g.data, Words<PAIRS>{},
            [](const auto& w, int i) { return unpack<__nv_bfloat16>(w.word[i]); });
  } else if (g.dtype == kFloat16) {
    load_as(g.data, Words<PAIRS>{}, [](const auto& w, int i) { return unpack<__half>(w.word[i]); });
  } else {
    load_as(g.data, Words<2 * PAIRS>{}, [](const auto& w, int i) -> float2 {
      return {__uint_as_float(w.word[2 * i]), __uint_as_float(w.word[2 * i + 1])};
    });
  }
}

/// x[..][t] = sum of decay(pair, x[..][0..t]) over the rows that exist.
template <int TOKENS, int PAIRS, class Decay>
__device__ __forceinline__ void sum_rows(float2 (&x)[PAIRS][TOKENS], int rows, Decay decay) {
  float2 sum[PAIRS] = {};
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const float2 d = decay(i, x[i][t]);
      if (t < rows) sum[i] = {sum[i].x + d.x, sum[i].y + d.y};
      x[i][t] = sum[i];
    }
  }
}

/// Raw gates -> the running sum of log2 decays over this thread's tokens, of which `rows` exist.
template <int TOKENS, int PAIRS>
__device__ __forceinline__ void sum_gates(float2 (&G)[PAIRS][TOKENS], const GateParams& params,
                                          int64_t hv, int rows, int column) {
  if (params.kind == kGateNone) {
    sum_rows(G, rows, [](int, float2 z) -> float2 {
      return {fast_no_gate(z.x), fast_no_gate(z.y)};
    });
    return;
  }
  const FastGate gate = fast_gate_of(params, hv);
  float2 bias[PAIRS];
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    bias[i] = {bias_of(params, hv, column + 2 * i), bias_of(params, hv, column + 2 * i + 1)};
  }
  const auto sum = [&](auto value) {
    sum_rows(G, rows, [&](int i, float2 z) -> float2 {
      return {value(gate, z.x + bias[i].x), value(gate, z.y + bias[i].y)};
    });
  };
  if (params.kind == kGateSoftplus) {
    gate.far ? sum(FarSoftplusGate{}) : sum(FastSoftplusGate{});
  } else {
    gate.far ? sum(FarBoundedGate{}) : sum(FastBoundedGate{});
  }
}

/// The same for one column pair.
template <int TOKENS>
__device__ __forceinline__ void load_gates(float2 (&z)[TOKENS], const Tensor& g, const Chunk& chunk,
                                           int64_t hv, int first, int column) {
  load_gates(reinterpret_cast<float2(&)[1][TOKENS]>(z), g,
             token_offset(g, chunk.batch, chunk.begin, hv), chunk.rows, first, column);
}
template <int TOKENS>
__device__ __forceinline__ void sum_gates(float2 (&G)[TOKENS], const GateParams& params, int64_t hv,
                                          int rows, int column) {
  sum_gates(reinterpret_cast<float2(&)[1][TOKENS]>(G), params, hv, rows, column);
}

}  // namespace kda::cuda::sm90
