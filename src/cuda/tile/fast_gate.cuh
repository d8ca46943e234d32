// Gates of section 3 in log2 units through the special function unit: relative error below 2e-5,
// against 4e-3 of the bf16 that the raw gate comes in.
#pragma once

#include "cuda/tile/gate.cuh"

namespace kda::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
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

/// The larger or smaller one, NaN if either is.
__device__ __forceinline__ float max_or_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

__device__ __forceinline__ float min_or_nan(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

__device__ __forceinline__ float A_log_of(const GateParams& params, int64_t hv) {
  return params.A_log.data ? load<float>(params.A_log, hv * params.A_log.stride[0]) : 0;
}

__device__ __forceinline__ FastGate fast_gate_from(const GateParams& params, float A_log) {
  constexpr float kLargest = kMostNormal<float>;
  constexpr float kFar = 60;  // exp(A_log) exp(z), z < -87, is lost below this
  // As gate_slope: not 0, so that an infinite input stays one; and -kLogFloor2 over it is finite.
  constexpr float kLeast = 0x1p-122f;
  const float slope = max_or_nan(min_or_nan(expf(A_log), kLargest), kLeast);
  if (params.kind == kGateSoftplus) {
    const bool far = A_log > kFar;
    return {far, slope, far ? A_log * kLog2E : slope};
  }
  const bool far = params.lower_bound < -1e30;
  // The bound may be beyond fp32.
  const float scale = far ? log2_of(static_cast<float>(-params.lower_bound * 0x1p-64)) + 64
                          : static_cast<float>(-params.lower_bound);
  return {far, min_or_nan(slope * kLog2E, kLargest), scale};
}

__device__ __forceinline__ FastGate fast_gate_of(const GateParams& params, int64_t hv) {
  return fast_gate_from(params, A_log_of(params, hv));
}

__device__ __forceinline__ float bias_of(const GateParams& params, int64_t hv, int column) {
  const Tensor& bias = params.dt_bias;
  return bias.data ? load<float>(bias, hv * bias.stride[0] + column * bias.stride[1]) : 0;
}

__device__ __forceinline__ float clamp_log2(float decay) { return max_or_nan(decay, kLogFloor2); }

/// The log2 decay of a token, clamped: of g itself, (3.4) and (3.8). z: raw input plus bias.
__device__ __forceinline__ float fast_no_gate(float g) { return clamp_log2(g * kLog2E); }

/// The gradient behind a decay, log2 of it, unless it is clamped; dg is that of its natural log.
/// Decays that are not clamped, and all factors of theirs, are finite.
template <class Chain>
__device__ __forceinline__ GateGradient<float> gradient_unless_clamped(float decay, float dg,
                                                                       Chain chain) {
  const bool clamped = decay < kLogFloor2;
  const GateGradient<float> x = chain(decay * kLn2);
  return {clamped ? 0 : x.dz, clamped ? 0 : x.dA_log};  // selected: a branch would stand alone
}

__device__ __forceinline__ GateGradient<float> fast_no_gate_gradient(float g, float dg) {
  return gradient_unless_clamped(g * kLog2E, dg, [&](float) -> GateGradient<float> {
    return {dg, 0};
  });
}

/// sigmoid(x) and sigmoid(-x), x in log2 units.
__device__ __forceinline__ float2 both_sigmoids(float x) {
  const float e = exp2_of(-fabsf(x));
  const float large = reciprocal_of(1 + e);
  return x < 0 ? float2{e * large, large} : float2{large, e * large};
}

/// Of the gates behind: `decay` is not clamped, the call is.
struct FastSoftplusGate {
  /// log2(1 + 2^y).
  static __device__ __forceinline__ float shape(float y) {
    return max_or_nan(y, 0) + log2_1p(exp2_of(-fabsf(y)));
  }
  static __device__ __forceinline__ float decay(const FastGate& gate, float z) {
    return -gate.slope * shape(z * kLog2E);
  }
  __device__ __forceinline__ float operator()(const FastGate& gate, float z) const {
    return clamp_log2(decay(gate, z));
  }
  static __device__ __forceinline__ GateGradient<float> gradient(const FastGate& gate, float z,
                                                                 float dg) {
    return gradient_unless_clamped(decay(gate, z), dg, [&](float g) -> GateGradient<float> {
      return {-gate.slope * (both_sigmoids(z * kLog2E).x * dg), dg * g};
    });
  }
};

struct FarSoftplusGate {
  static __device__ __forceinline__ float decay(const FastGate& gate, float z) {
    if (z > -20) return FastSoftplusGate::decay(gate, z);
    return -kLog2E * exp2_of(fmaf(z, kLog2E, gate.scale));
  }
  __device__ __forceinline__ float operator()(const FastGate& gate, float z) const {
    return clamp_log2(decay(gate, z));
  }
  /// What is not clamped is exp(z) times its factor: its own derivative.
  static __device__ __forceinline__ GateGradient<float> gradient(const FastGate& gate, float z,
                                                                 float dg) {
    return gradient_unless_clamped(decay(gate, z), dg, [&](float g) -> GateGradient<float> {
      return {dg * g, dg * g};
    });
  }
};

/// (3.9), (3.10) behind a decay, s = both_sigmoids(slope z). Where dz is 0, z may be infinite.
__device__ __forceinline__ GateGradient<float> bounded_gradient(const FastGate& gate, float z,
                                                                float decay, float2 s, float dg) {
  return gradient_unless_clamped(decay, dg, [&](float g) -> GateGradient<float> {
    const float dz = gate.slope * kLn2 * (g * s.y) * dg;
    return {dz, dz == 0 ? 0 : dz * z};
  });
}

struct FastBoundedGate {
  static __device__ __forceinline__ float shape(const FastGate& gate, float z) {
    return reciprocal_of(1 + exp2_of(-gate.slope * z));
  }
  static __device__ __forceinline__ float decay(const FastGate& gate, float z) {
    return -kLog2E * gate.scale * shape(gate, z);
  }
  __device__ __forceinline__ float operator()(const FastGate& gate, float z) const {
    return clamp_log2(decay(gate, z));
  }
  /// Its sigmoid serves both.
  static __device__ __forceinline__ GateGradient<float> gradient(const FastGate& gate, float z,
                                                                 float dg) {
    const float2 s = both_sigmoids(gate.slope * z);
    return bounded_gradient(gate, z, -kLog2E * gate.scale * s.x, s, dg);
  }
};

struct FarBoundedGate {
  static __device__ __forceinline__ float decay(const FastGate& gate, float z) {
    const float x = gate.slope * z;
    const float log_sigmoid = (x < 0 ? x : 0) - log2_1p(exp2_of(-fabsf(x)));
    return -kLog2E * exp2_of(gate.scale + log_sigmoid);
  }
  __device__ __forceinline__ float operator()(const FastGate& gate, float z) const {
    return clamp_log2(decay(gate, z));
  }
  static __device__ __forceinline__ GateGradient<float> gradient(const FastGate& gate, float z,
                                                                 float dg) {
    return bounded_gradient(gate, z, decay(gate, z), both_sigmoids(gate.slope * z), dg);
  }
};

/// Calls f with the kind of gate that is not kGateNone; the branch is uniform.
template <class F>
__device__ __forceinline__ void with_gate(const GateParams& params, const FastGate& gate, F f) {
  if (params.kind == kGateSoftplus) {
    gate.far ? f(FarSoftplusGate{}) : f(FastSoftplusGate{});
  } else {
    gate.far ? f(FarBoundedGate{}) : f(FastBoundedGate{});
  }
}

}  // namespace kda::cuda
