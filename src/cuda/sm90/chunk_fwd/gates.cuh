// Gates of a chunk in registers: a thread has a column pair of some consecutive tokens.
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
  __builtin_assume(x >= 0 && x < kPrepThreads);
  return x;
}

/// Two neighbouring elements, aligned together.
__device__ __forceinline__ float2 load_pair(const __nv_bfloat16* p) {
  return unpack<__nv_bfloat16>(*reinterpret_cast<const uint32_t*>(p));
}
__device__ __forceinline__ float2 load_pair(const __half* p) {
  return unpack<__half>(*reinterpret_cast<const uint32_t*>(p));
}
__device__ __forceinline__ float2 load_pair(const float* p) {
  return *reinterpret_cast<const float2*>(p);
}

/// Column pairs of g for this thread's tokens, as they are in memory; 0 beyond the last row.
template <int TOKENS>
__device__ __forceinline__ void load_gates(float2 (&z)[TOKENS], const Tensor& g, const Chunk& chunk,
                                           int64_t hv, int first, int column) {
  const auto load_as = [&]<class T>(const T* data) {
    data += token_offset(g, chunk.batch, chunk.begin + first, hv) + column;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      z[t] = first + t < chunk.rows ? load_pair(data) : float2{0, 0};
      data += g.stride[1];
    }
  };
  if (g.dtype == kBFloat16) {
    load_as(static_cast<const __nv_bfloat16*>(g.data));
  } else if (g.dtype == kFloat16) {
    load_as(static_cast<const __half*>(g.data));
  } else {
    load_as(static_cast<const float*>(g.data));
  }
}

/// x[t] = sum of decay(x[0..t]) over the rows that exist.
template <int TOKENS, class Decay>
__device__ __forceinline__ void sum_rows(float2 (&x)[TOKENS], int rows, Decay decay) {
  float2 sum{0, 0};
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    const float2 d = decay(x[t]);
    if (t < rows) sum = {sum.x + d.x, sum.y + d.y};
    x[t] = sum;
  }
}

/// Raw gates -> the running sum of log2 decays over this thread's tokens, of which `rows` exist.
template <int TOKENS>
__device__ __forceinline__ void sum_gates(float2 (&G)[TOKENS], const GateParams& params, int64_t hv,
                                          int rows, int column) {
  if (params.kind == kGateNone) {
    sum_rows(G, rows, [](float2 z) -> float2 { return {fast_no_gate(z.x), fast_no_gate(z.y)}; });
    return;
  }
  const FastGate gate = fast_gate_of(params, hv);
  const auto sum = [&](auto value) {
    const float x = bias_of(params, hv, column);
    const float y = bias_of(params, hv, column + 1);
    sum_rows(G, rows, [&](float2 z) -> float2 {
      return {value(gate, z.x + x), value(gate, z.y + y)};
    });
  };
  with_gate(params, gate, sum);
}

}  // namespace kda::cuda::sm90
