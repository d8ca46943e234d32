// Scalar functions of section 3: gates, sigmoids and the clamp, with small relative error for
// small results (a channel with g = -1e-3 a token is a long memory).
#pragma once

#include "cuda/tile/convert.cuh"

namespace kda::cuda {

inline constexpr int32_t kGateNone = 0;
inline constexpr int32_t kGateSoftplus = 1;
inline constexpr int32_t kGateLowerBound = 2;

/// Below this natural-log decay a token forgets everything that fp32 resolves: (6.5).
inline constexpr double kGateFloor = -40;
inline constexpr double kInvLn2 = 1.4426950408889634;

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ double exp2_of(double x) { return exp2(x); }

template <class Real>
__device__ __forceinline__ Real sigmoid(Real x) {
  if (x >= 0) return 1 / (1 + exp(-x));
  const Real e = exp(x);
  return e / (1 + e);
}

template <class Real>
__device__ __forceinline__ Real softplus(Real z) {
  if (z > 20) return z;
  return fmax(z, Real(0)) + log1p(exp(-fabs(z)));
}

/// What one value head and channel adds to the gate.
template <class Real>
struct Gate {
  Real slope = 1;  ///< a = exp(A_log)
  Real bias = 0;
};

template <class Real>
__device__ __forceinline__ Gate<Real> gate_of(const GateParams& params, int64_t hv, int32_t k) {
  Gate<Real> gate;
  if (params.A_log.data) gate.slope = exp(load<Real>(params.A_log, hv * params.A_log.stride[0]));
  if (params.dt_bias.data) {
    gate.bias =
        load<Real>(params.dt_bias, hv * params.dt_bias.stride[0] + k * params.dt_bias.stride[1]);
  }
  return gate;
}

/// The natural-log decay, not clamped: g itself, (3.4) or (3.8).
template <class Real>
__device__ __forceinline__ Real gate_value(const GateParams& params, const Gate<Real>& gate,
                                           Real raw) {
  if (params.kind == kGateNone) return raw;
  const Real z = raw + gate.bias;
  if (params.kind == kGateSoftplus) return -gate.slope * softplus(z);
  return static_cast<Real>(params.lower_bound) * sigmoid(gate.slope * z);
}

/// NaN stays NaN.
template <class Real>
__device__ __forceinline__ Real clamp_gate(Real g) {
  return g < Real(kGateFloor) ? Real(kGateFloor) : g;
}

}  // namespace kda::cuda
