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

/// The row of a chunk without tokens.
__device__ __forceinline__ void clear_partial(const GradParams& p, int64_t row, uint32_t hv) {
  if (p.partial == nullptr) return;
  for (auto k = static_cast<int32_t>(threadIdx.x); k <= p.heads.K;
       k += static_cast<int32_t>(blockDim.x)) {
    partial_row(p, row, hv)[k] = 0;
  }
}

/// Two neighbouring elements, aligned together.
__device__ __forceinline__ void store_pair(const Tensor& t, int64_t offset, float2 x) {
  with_element(t.dtype, [&]<class T>(Element<T>) {
    T* const to = static_cast<T*>(t.data) + offset;
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
  int tid = static_cast<int>(threadIdx.x);
  asm volatile("" : "+r"(tid));  // what follows from it was formed before: not kept until here
  const int column = tid % GradTraits<K>::kPairs * 2;
  const int segment = tid / GradTraits<K>::kPairs;
  const int first = segment * kTokens;
  float2 z[kTokens];
  load_gates(z, p.gate.g, work.chunk, work.hv, first, column);
  const int64_t stride = p.dg.stride[1];
  int64_t offset = token_offset(p.dg, work.chunk.batch, work.chunk.begin + first, work.hv) + column;
  float2 dbias{0, 0};
  float dA_log = 0;
  const auto each = [&](auto gradient) {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (first + t >= work.chunk.rows) break;
      const float2 dg = pair_at(shared.G[first + t], column);
      const GateGradient<float> x = gradient(z[t].x, dg.x, 0);
      const GateGradient<float> y = gradient(z[t].y, dg.y, 1);
      if (p.dg.data != nullptr) store_pair(p.dg, offset, {x.dz, y.dz});
      offset += stride;
      dbias = {dbias.x + x.dz, dbias.y + y.dz};
      dA_log += x.dA_log + y.dA_log;
    }
  };
  if (p.gate.kind == kGateNone) {
    each([](float g, float dg, int) { return fast_no_gate_gradient(g, dg); });
    return;
  }
  const FastGate gate = fast_gate_of(p.gate, work.hv);
  const float bias[2] = {bias_of(p.gate, work.hv, column), bias_of(p.gate, work.hv, column + 1)};
  with_gate(p.gate, gate, [&](auto kind) {
    each([&](float raw, float dg, int e) { return kind.gradient(gate, raw + bias[e], dg); });
  });
  if (p.partial == nullptr) return;
  put_pair(&shared.totals[segment][column], dbias);
  for (int step = 16; step > 0; step /= 2) dA_log += __shfl_xor_sync(~0u, dA_log, step);
  if (threadIdx.x % 32 == 0) shared.partial[0][threadIdx.x / 32][0] = dA_log;
}

/// The sums of all warps and segments, in fixed order.
template <int K>
__device__ __forceinline__ void store_partial(const GradShared<K>& shared, const GradParams& p,
                                              const GradWork& work) {
  const int k = static_cast<int>(threadIdx.x);
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
