// Phase 1 of prep: raw gates -> running sums of log2 decays, in shared memory.
#pragma once

#include "cuda/sm90/chunk_fwd/prep_shared.cuh"

namespace kda::cuda::sm90 {

/// A log2 decay as -scale min(shape, limit): multiplied where it is summed, it costs an instruction
/// less. bias: times bias_factor.
template <class Kind>
struct SummedGate {
  static constexpr float bias_factor = 1;
  const FastGate& gate;
  __device__ __forceinline__ float scale() const { return 1; }
  __device__ __forceinline__ float shape(float raw, float bias) const {
    return -Kind::decay(gate, raw + bias);
  }
};
template <>
struct SummedGate<FastSoftplusGate> {
  static constexpr float bias_factor = kLog2E;
  const FastGate& gate;
  __device__ __forceinline__ float scale() const { return gate.slope; }
  __device__ __forceinline__ float shape(float raw, float bias) const {
    return FastSoftplusGate::shape(fmaf(raw, kLog2E, bias));
  }
};
template <>
struct SummedGate<FastBoundedGate> {
  static constexpr float bias_factor = 1;
  const FastGate& gate;
  __device__ __forceinline__ float scale() const { return kLog2E * gate.scale; }
  __device__ __forceinline__ float shape(float raw, float bias) const {
    return FastBoundedGate::shape(gate, raw + bias);
  }
};
struct SummedNoGate {
  static constexpr float bias_factor = 0;
  __device__ __forceinline__ float scale() const { return kLog2E; }
  __device__ __forceinline__ float shape(float g, float) const { return -g; }
};

/// The raw gates of the warp's rows, in place, -> the running sums of their log2 decays, of which
/// `rows` exist. 16-bit gates lie in the second half of a row.
template <class Io, int K, class Gate>
__device__ __forceinline__ void sum_rows(PrepShared<Io, K>& shared, int32_t dtype, int rows,
                                         const float* bias_row, Gate gate) {
  constexpr int kPairs = K / 64;
  constexpr int kAtOnce = 2;
  constexpr int kRowBytes = PrepTraits<Io, K>::kDecayBytes;
  const int thread = this_thread();
  const int warp = thread / 32;
  const int column = thread % 32 * (2 * kPairs);
  rows -= 8 * warp;
  const float scale = gate.scale();
  const float limit = -kLogFloor2 / scale;
  float2 bias[kPairs];
  float2 sum[kPairs] = {};
  load_pairs(bias, bias_row + column);
#pragma unroll
  for (float2& x : bias) x = x * Gate::bias_factor;
  unsigned char* row = shared.rows.decay[8 * warp];
#pragma unroll 1
  for (int t = 0; t < 8; t += kAtOnce, row += kAtOnce * kRowBytes) {
    float2 z[kAtOnce][kPairs];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const unsigned char* const from = row + u * kRowBytes;
      if (dtype == kBFloat16) {
        load_pairs(z[u], reinterpret_cast<const __nv_bfloat16*>(from) + K + column);
      } else if (dtype == kFloat16) {
        load_pairs(z[u], reinterpret_cast<const __half*>(from) + K + column);
      } else {
        load_pairs(z[u], reinterpret_cast<const float*>(from) + column);
      }
    }
    __syncwarp();  // other lanes' gates lie where this one's sums go
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const float x = min_or_nan(gate.shape(z[u][i].x, bias[i].x), limit);
        const float y = min_or_nan(gate.shape(z[u][i].y, bias[i].y), limit);
        if (t + u < rows) sum[i] = {fmaf(-scale, x, sum[i].x), fmaf(-scale, y, sum[i].y)};
      }
      put_pairs(reinterpret_cast<float*>(row + u * kRowBytes) + column, sum);
    }
  }
  put_pairs(&shared.totals[warp][column], sum);
}

template <class Io, int K>
__device__ __forceinline__ void sum_gates(PrepShared<Io, K>& shared, const GateParams& params,
                                          const PrepItem& item, const float* bias) {
  const int32_t dtype = params.g.dtype;
  if (params.kind == kGateNone) {
    sum_rows(shared, dtype, item.rows, bias, SummedNoGate{});
    return;
  }
  const FastGate gate = item.gate;
  with_gate(params, gate, [&]<class Kind>(Kind) {
    sum_rows(shared, dtype, item.rows, bias, SummedGate<Kind>{gate});
  });
}

}  // namespace kda::cuda::sm90
