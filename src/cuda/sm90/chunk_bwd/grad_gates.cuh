// The gate's backward in grad's epilogue: gradients of the decays, in shared memory over G -> those
// of the raw gates in the caller's dtype, and a chunk's sums for A_log and dt_bias.
//
// A thread has a column pair and 8 tokens, as when the gates were loaded.
#pragma once

#include "cuda/sm90/chunk_bwd/grad_load.cuh"

namespace kda::cuda::sm90 {

/// A chunk's row of GradParams::partial: the sums of dz by channel, then that of dA_log.
__device__ __forceinline__ float* partial_row(const GradParams& p, int64_t row, uint32_t hv) {
  return p.partial + (row * p.heads.HV + hv) * (p.heads.K + 1);
}

/// The row of a chunk without tokens, by one warp.
__device__ __forceinline__ void clear_partial(const GradParams& p, int64_t row, uint32_t hv,
                                              int lane) {
  if (p.partial == nullptr) return;
  for (int32_t k = lane; k <= p.heads.K; k += 32) partial_row(p, row, hv)[k] = 0;
}

/// A thread's tokens from `first` on of a column pair: the steps of dg in shared.G become dz.
/// Leaves sums of dz in `dbias`, that of dA_log is the result. `gates`: rows of raw gates.
template <class Io, int K, class T, class Gradient>
__device__ __forceinline__ float backward_rows(GradShared<Io, K>& shared, const T* gates, int first,
                                               int rows, int column, float2 dg, float2& dbias,
                                               Gradient gradient) {
  const float2 bias = pair_at(shared.bias, column);
  float dA_log = 0;
  // Unrolled further, the code that all warps walk through would leave the instruction cache.
#pragma unroll 4
  for (int t = first; t < first + GradTraits<Io, K>::kTokens; ++t) {
    const float2 z = pair_at(gates + t * GradTraits<Io, K>::kStride, column);
    const float2 step = pair_at(shared.G[t], column);
    const GateGradient<float> x = gradient(z.x + bias.x, dg.x);
    const GateGradient<float> y = gradient(z.y + bias.y, dg.y);
    put_pair(&shared.G[t][column], {x.dz, y.dz});
    if (t < rows) {
      dbias = {dbias.x + x.dz, dbias.y + y.dz};
      dA_log += x.dA_log + y.dA_log;
    }
    dg = {dg.x + step.x, dg.y + step.y};
  }
  return dA_log;
}

/// dz over G, and the sums of segments and warps in shared memory.
template <class Io, int K, int GATE>
__device__ __forceinline__ void backward_gates(GradShared<Io, K>& shared, const GradParams& p,
                                               int rows) {
  const ColumnPair<Io, K> at;
  const int first = at.segment * GradTraits<Io, K>::kTokens;
  float2 dg = pair_at(shared.dg_first, at.column);
#pragma unroll
  for (int i = 0; i < kChunk / GradTraits<Io, K>::kTokens; ++i) {
    const float2 before = pair_at(shared.dg_steps[i], at.column);
    if (i < at.segment) dg = {dg.x + before.x, dg.y + before.y};
  }
  float2 dbias{0, 0};
  float dA_log = 0;
  const FastGate gate = shared.gate;
  with_raw_gates(shared, p.gate.g.dtype, [&](const auto* gates) {
    with_gate_of<GATE>(gate, [&](auto kind) {
      dA_log = backward_rows(shared, gates, first, rows, at.column, dg, dbias,
                             [&](float z, float dg) { return kind.gradient(gate, z, dg); });
    });
  });
  if (p.partial == nullptr) return;
  put_pair(&shared.totals[at.segment][at.column], dbias);
  for (int step = 16; step > 0; step /= 2) dA_log += __shfl_xor_sync(~0u, dA_log, step);
  const int tid = thread_index();
  if (tid % 32 == 0) shared.partial[0][tid / 32][0] = dA_log;
}

/// dz as backward_gates left it.
template <class Io, int K>
__device__ __forceinline__ void store_dg(const GradShared<Io, K>& shared, const GradParams& p,
                                         const GradWork& work) {
  const int rows = work.chunk.rows;
  with_element(p.dg.dtype, [&]<class T>(Element<T>) {
    T* const to = work.at<T>(kRowsDg);
    for (int e = thread_index(); e < rows * (K / 8); e += GradTraits<Io, K>::kThreads) {
      const int row = e / (K / 8);
      const int column = e % (K / 8) * 8;
      const auto* const from = reinterpret_cast<const float4*>(&shared.G[row][column]);
      auto* const place = reinterpret_cast<uint4*>(to + row * p.dg.stride[1] + column);
      const float4 x = from[0];
      const float4 y = from[1];
      if constexpr (sizeof(T) == 2) {
        *place = {pack<T>(x.x, x.y), pack<T>(x.z, x.w), pack<T>(y.x, y.y), pack<T>(y.z, y.w)};
      } else if constexpr (sizeof(T) == 4) {
        reinterpret_cast<float4*>(place)[0] = x;
        reinterpret_cast<float4*>(place)[1] = y;
      }
    }
  });
}

/// The sums of all warps and segments, in fixed order.
template <class Io, int K>
__device__ __forceinline__ void store_partial(const GradShared<Io, K>& shared, const GradParams& p,
                                              const GradWork& work) {
  const int k = thread_index();
  if (p.partial == nullptr || k > K) return;
  float sum = 0;
  if (k < K) {
#pragma unroll
    for (const auto& segment : shared.totals) sum += segment[k];
  } else {
#pragma unroll
    for (const auto& warp : shared.partial[0]) sum += warp[0];
  }
  partial_row(p, work.row, work.hv)[k] = sum;
}

}  // namespace kda::cuda::sm90
