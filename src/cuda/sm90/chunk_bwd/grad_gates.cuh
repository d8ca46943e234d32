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

/// Two neighbouring elements, aligned together.
__device__ __forceinline__ void store_pair(void* row, int32_t dtype, int64_t offset, float2 x) {
  with_element(dtype, [&]<class T>(Element<T>) {
    T* const to = static_cast<T*>(row) + offset;
    if constexpr (sizeof(T) == 2) {
      *reinterpret_cast<uint32_t*>(to) = pack<T>(x.x, x.y);
    } else if constexpr (sizeof(T) == 4) {
      *reinterpret_cast<float2*>(to) = x;
    }
  });
}

/// Leaves the sums of segments and warps in shared memory.
template <int K>
__device__ __forceinline__ void backward_gates(GradShared<K>& shared, const GradParams& p,
                                               const GradWork& work) {
  constexpr int kTokens = GradTraits<K>::kTokens;
  const ColumnPair<K> at;
  const int column = at.column;
  const int first = at.segment * kTokens;
  float2 dg = pair_at(shared.dg_first, column);
#pragma unroll
  for (int i = 0; i < kChunk / kTokens; ++i) {
    const float2 before = pair_at(shared.dg_steps[i], column);
    if (i < at.segment) dg = {dg.x + before.x, dg.y + before.y};
  }
  const float2 bias = pair_at(shared.bias, column);
  float2 dbias{0, 0};
  float dA_log = 0;
  const auto each = [&](auto gradient) {
    const int64_t stride = p.dg.stride[1];
    int64_t offset = first * stride + column;
    // Not unrolled further: what all warps execute has to stay in the instruction cache.
#pragma unroll 2
    for (int t = first; t < first + kTokens && t < work.chunk.rows; ++t, offset += stride) {
      const float2 z = read_gate(shared, p.gate.g.dtype, t, column);
      const GateGradient<float> x = gradient(z.x + bias.x, dg.x);
      const GateGradient<float> y = gradient(z.y + bias.y, dg.y);
      if (p.dg.data != nullptr) store_pair(work.rows[kRowsDg], p.dg.dtype, offset, {x.dz, y.dz});
      dbias = {dbias.x + x.dz, dbias.y + y.dz};
      dA_log += x.dA_log + y.dA_log;
      const float2 step = pair_at(shared.G[t], column);
      dg = {dg.x + step.x, dg.y + step.y};
    }
  };
  if (p.gate.kind == kGateNone) {
    each([](float g, float dg) { return fast_no_gate_gradient(g, dg); });
    return;
  }
  const FastGate gate = shared.gate;
  with_gate(p.gate, gate, [&](auto kind) {
    each([&](float z, float dg) { return kind.gradient(gate, z, dg); });
  });
  if (p.partial == nullptr) return;
  put_pair(&shared.totals[at.segment][column], dbias);
  for (int step = 16; step > 0; step /= 2) dA_log += __shfl_xor_sync(~0u, dA_log, step);
  const int tid = thread_index();
  if (tid % 32 == 0) shared.partial[0][tid / 32][0] = dA_log;
}

/// The sums of all warps and segments, in fixed order.
template <int K>
__device__ __forceinline__ void store_partial(const GradShared<K>& shared, const GradParams& p,
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
