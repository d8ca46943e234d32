// Gates of section 3 in log2 units through the special function unit: relative error below 2e-5,
// against 4e-3 of the bf16 that the raw gate comes in.
#pragma once

#include "cuda/tile/gate.cuh"

namespace kda::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLogFloor2 = -40 * kLog2E;

__device__ __forceinline__ float log2_of(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_of(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// log2(1 + e), 0 <= e <= 1, as e times a polynomial: relative error below 9e-6 for a small e too
/// (a channel that forgets 1e-3 a token is a long memory), and no second special function.
__device__ __forceinline__ float log2_1p(float e) {
  float x = fmaf(e, -0.034435902f, 0.14603287f);
  x = fmaf(e, x, -0.30303618f);
  x = fmaf(e, x, 0.46917406f);
  x = fmaf(e, x, -0.72042614f);
  return e * fmaf(e, x, 1.4426829f);
}

/// What a value head's channels have in common. far: factors beyond fp32, products are formed as
/// sums of exponents.
struct FastGate {
  bool far;
  float slope;  ///< softplus: exp(A_log); lower bound: log2(e) exp(A_log)
  float scale;  ///< log2 of the factor that multiplies (far), or the factor
};

__device__ __forceinline__ FastGate fast_gate_of(const GateParams& params, int64_t hv) {
  constexpr float kLargest = 3.4e38f;
  constexpr float kFar = 60;  // exp(A_log) exp(z), z < -87, is lost below this
  const float A_log =
      params.A_log.data ? load<float>(params.A_log, hv * params.A_log.stride[0]) : 0;
  const float slope = fminf(expf(A_log), kLargest);
  if (params.kind == kGateSoftplus) {
    const bool far = A_log > kFar;
    return {far, slope, far ? A_log * kLog2E : slope};
  }
  const bool far = params.lower_bound < -1e30;
  // The bound may be beyond fp32.
  const float scale = far ? log2_of(static_cast<float>(-params.lower_bound * 0x1p-64)) + 64
                          : static_cast<float>(-params.lower_bound);
  return {far, fminf(slope * kLog2E, kLargest), scale};
}

__device__ __forceinline__ float bias_of(const GateParams& params, int64_t hv, int column) {
  const Tensor& bias = params.dt_bias;
  return bias.data ? load<float>(bias, hv * bias.stride[0] + column * bias.stride[1]) : 0;
}

/// The larger one, NaN if either is.
__device__ __forceinline__ float max_or_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

__device__ __forceinline__ float clamp_log2(float decay) { return max_or_nan(decay, kLogFloor2); }

/// The log2 decay of a token, clamped: of g itself, (3.4) and (3.8). z: raw input plus bias.
__device__ __forceinline__ float fast_no_gate(float g) { return clamp_log2(g * kLog2E); }

struct FastSoftplusGate {
  __device__ __forceinline__ float operator()(const FastGate& gate, float z) const {
    z *= kLog2E;
    return clamp_log2(-gate.slope * (max_or_nan(z, 0) + log2_1p(exp2_of(-fabsf(z)))));
  }
};

struct FarSoftplusGate {
  __device__ __forceinline__ float operator()(const FastGate& gate, float z) const {
    if (z > -20) return FastSoftplusGate{}(gate, z);
    return clamp_log2(-kLog2E * exp2_of(fmaf(z, kLog2E, gate.scale)));
  }
};

struct FastBoundedGate {
  __device__ __forceinline__ float operator()(const FastGate& gate, float z) const {
    return clamp_log2(-kLog2E * gate.scale * reciprocal_of(1 + exp2_of(-gate.slope * z)));
  }
};

struct FarBoundedGate {
  __device__ __forceinline__ float operator()(const FastGate& gate, float z) const {
    const float x = gate.slope * z;
    const float log_sigmoid = (x < 0 ? x : 0) - log2_1p(exp2_of(-fabsf(x)));
    return clamp_log2(-kLog2E * exp2_of(gate.scale + log_sigmoid));
  }
};

}  // namespace kda::cuda
