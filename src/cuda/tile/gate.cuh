// Scalar functions of section 3: gates, sigmoids and the clamp, with small relative error for
// small results (a channel with g = -1e-3 a token is a long memory).
#pragma once

#include <limits>

#include "cuda/tile/convert.cuh"

namespace kda::cuda {

inline constexpr int32_t kGateNone = 0;
inline constexpr int32_t kGateSoftplus = 1;
inline constexpr int32_t kGateLowerBound = 2;

/// Below this natural-log decay a token forgets everything that fp32 resolves: (6.5).
inline constexpr double kGateFloor = -40;
inline constexpr double kInvLn2 = 1.4426950408889634;
/// Beyond exp of this a factor of the gate has no product with what makes up for it: fp32 ends at
/// exp(88), and softplus and sigmoid are then below exp(-56), where both are exp(x) alone.
inline constexpr double kFarLog = 60;
template <class Real>
inline constexpr Real kLeastNormal = std::numeric_limits<Real>::min();
template <class Real>
inline constexpr Real kMostNormal = std::numeric_limits<Real>::max();

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ double exp2_of(double x) { return exp2(x); }

template <class Real>
__device__ __forceinline__ Real sigmoid(Real x) {
  const Real e = exp(-fabs(x));  // no branch: the channels of a lane interleave
  return (x >= 0 ? Real(1) : e) / (1 + e);
}

template <class Real>
__device__ __forceinline__ Real softplus(Real z) {
  const Real y = fmax(z, Real(0)) + log1p(exp(-fabs(z)));
  return z > 20 ? z : y;
}

/// What one value head and channel adds to the gate.
template <class Real>
struct Gate {
  Real slope = 1;  ///< gate_slope of A_log
  Real bias = 0;
};

/// a = exp(A_log) within the normal numbers, so that 0 stays 0 and infinity infinity times it. A
/// softplus gate with a beyond kFarLog gets -A_log instead. NaN stays NaN.
template <class Real>
__device__ __forceinline__ Real gate_slope(const GateParams& params, Real A_log) {
  if (params.kind == kGateSoftplus && A_log > Real(kFarLog)) return -A_log;
  const Real a = exp(A_log);
  if (a < kLeastNormal<Real>) return kLeastNormal<Real>;
  return a > kMostNormal<Real> ? kMostNormal<Real> : a;
}

template <class Real>
__device__ __forceinline__ Gate<Real> gate_of(const GateParams& params, int64_t hv, int32_t k) {
  Gate<Real> gate;
  if (params.A_log.data) {
    gate.slope = gate_slope(params, load<Real>(params.A_log, hv * params.A_log.stride[0]));
  }
  if (params.dt_bias.data) {
    gate.bias =
        load<Real>(params.dt_bias, hv * params.dt_bias.stride[0] + k * params.dt_bias.stride[1]);
  }
  return gate;
}

/// What a token adds to a channel's parameter gradients.
template <class Real>
struct GateGradient {
  Real dz;      ///< of the raw input and the bias
  Real dA_log;  ///< (3.6), (3.10)
};

/// The natural-log decay, not clamped: g itself, (3.4) or (3.8).
template <class Real>
__device__ __forceinline__ Real gate_value(const GateParams& params, const Gate<Real>& gate,
                                           Real raw) {
  if (params.kind == kGateNone) return raw;
  const Real z = raw + gate.bias;
  if (params.kind == kGateSoftplus) {
    return gate.slope < 0 ? -exp(z - gate.slope) : -gate.slope * softplus(z);
  }
  const Real x = gate.slope * z;
  if (params.log_bound > kFarLog) {
    return -exp(static_cast<Real>(static_cast<double>(x) + params.log_bound));
  }
  return static_cast<Real>(params.lower_bound) * sigmoid(x);
}

/// dg / dz, (3.5) or (3.9), where g = gate_value is not clamped.
template <class Real>
__device__ __forceinline__ Real gate_derivative(const GateParams& params, const Gate<Real>& gate,
                                                Real z, Real g) {
  if (params.kind == kGateNone) return 1;
  if (params.kind == kGateSoftplus) return gate.slope < 0 ? g : -gate.slope * sigmoid(z);
  return gate.slope * (g * sigmoid(-gate.slope * z));
}

/// NaN stays NaN.
template <class Real>
__device__ __forceinline__ Real clamp_gate(Real g) {
  return g < Real(kGateFloor) ? Real(kGateFloor) : g;
}

}  // namespace kda::cuda
