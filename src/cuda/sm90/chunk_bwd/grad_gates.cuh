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

/// dz of a column pair of tokens `first` and so on, in the caller's dtype.
template <int TOKENS>
__device__ __forceinline__ void store_dz(const GradParams& p, const GradWork& work, int first,
                                         int column, const float2 (&dz)[TOKENS]) {
  with_element(p.dg.dtype, [&]<class T>(Element<T>) {
    T* to = work.at<T>(kRowsDg) + first * p.dg.stride[1] + column;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t, to += p.dg.stride[1]) {
      if (first + t >= work.chunk.rows) continue;
      if constexpr (sizeof(T) == 2) {
        *reinterpret_cast<uint32_t*>(to) = pack<T>(dz[t].x, dz[t].y);
      } else if constexpr (sizeof(T) == 4) {
        *reinterpret_cast<float2*>(to) = dz[t];
      }
    }
  });
}

/// A thread's tokens from `first` on of a column pair, from the steps of dg in shared.G. Leaves
/// sums of dz in `dbias`, that of dA_log is the result. `gates`: rows of raw gates.
template <class Io, int K, class T, class Gradient>
__device__ __forceinline__ float backward_rows(const GradShared<Io, K>& shared, const GradParams& p,
                                               const GradWork& work, const T* gates, int first,
                                               int column, float2 dg, float2& dbias,
                                               Gradient gradient) {
  const int rows = work.chunk.rows;
  const float2 bias = pair_at(shared.bias, column);
  float dA_log = 0;
  // Unrolled further, the code that all warps walk through would leave the instruction cache.
  constexpr int kAtOnce = GradTraits<Io, K>::kTokens / 2;
#pragma unroll 1
  for (int t0 = first; t0 < first + GradTraits<Io, K>::kTokens; t0 += kAtOnce) {
    float2 z[kAtOnce];
    float2 steps[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      z[i] = bias + pair_at(gates + (t0 + i) * GradTraits<Io, K>::kStride, column);
      steps[i] = pair_at(shared.G[t0 + i], column);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const GateGradient<float> x = gradient(z[i].x, dg.x);
      const GateGradient<float> y = gradient(z[i].y, dg.y);
      z[i] = {x.dz, y.dz};
      if (t0 + i < rows) {
        dbias = dbias + z[i];
        dA_log += x.dA_log + y.dA_log;
      }
      dg = dg + steps[i];
    }
    if (p.dg.data != nullptr) store_dz(p, work, t0, column, z);
  }
  return dA_log;
}

/// dz to memory, and the sums of segments and warps in shared memory.
template <class Io, int K, int GATE>
__device__ __forceinline__ void backward_gates(GradShared<Io, K>& shared, const GradParams& p,
                                               const GradWork& work) {
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
      dA_log = backward_rows(shared, p, work, gates, first, at.column, dg, dbias,
                             [&](float z, float dg) { return kind.gradient(gate, z, dg); });
    });
  });
  if (p.partial == nullptr) return;
  put_pair(&shared.totals[at.segment][at.column], dbias);
  for (int step = 16; step > 0; step /= 2) dA_log += __shfl_xor_sync(~0u, dA_log, step);
  const int tid = thread_index();
  if (tid % 32 == 0) shared.partial[0][tid / 32][0] = dA_log;
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
  partial_row(p, work.row, work.pair.hv)[k] = sum;
}

}  // namespace kda::cuda::sm90
