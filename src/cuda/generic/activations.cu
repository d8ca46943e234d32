// Section 3 outside the gate: norms of q and k, beta, and the last steps of the backward pass for
// them.
#include "cuda/generic/stages.h"
#include "cuda/launch.h"
#include "cuda/tile/gate.cuh"
#include "cuda/tile/sequence.cuh"

namespace kda::cuda {
namespace {

constexpr int kBlock = 256;
constexpr int kWarps = kBlock / 32;
constexpr int kMaxK = 256;
constexpr double kNormEps = 1e-6;

template <class Real>
__device__ Real warp_sum(Real x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

/// Row (batch, token, head) of a tensor [B, T, heads, ...].
struct Row {
  int64_t batch, token, head;
};

__device__ Row row_of(int64_t index, int64_t T, int64_t heads) {
  return {index / heads / T, index / heads % T, index % heads};
}

/// A lane's channels lane, lane + 32, ... of a vector; 0 from K on.
template <class Real>
using Lanes = Real[kMaxK / 32];

template <class Real>
__device__ __forceinline__ void load_lanes(Lanes<Real>& x, const Tensor& t, int64_t base,
                                           int32_t K) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  with_element(t.dtype, [&]<class T>(Element<T>) {
    const T* data = static_cast<const T*>(t.data) + base;
#pragma unroll
    for (int j = 0; j < kMaxK / 32; ++j) {
      const int k = lane + 32 * j;
      x[j] = k < K ? to_real<Real>(data[k * t.stride[3]]) : Real(0);
    }
  });
}

template <class Real>
__device__ void norm_row(const Tensor& x, const Tensor& r, const Row& row, int32_t K) {
  Lanes<Real> value;
  load_lanes(value, x, token_offset(x, row.batch, row.token, row.head), K);
  Real sum = 0;
#pragma unroll
  for (int j = 0; j < kMaxK / 32; ++j) sum += value[j] * value[j];
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) {
    store<Real>(r, token_offset(r, row.batch, row.token, row.head),
                1 / sqrt(sum + static_cast<Real>(kNormEps)));
  }
}

/// One warp a vector.
template <class Real>
__global__ void __launch_bounds__(kBlock) norms(const NormsParams p) {
  const int64_t rows = p.B * p.T * p.heads.H;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t i = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32; i < rows; i += step) {
    const Row row = row_of(i, p.T, p.heads.H);
    if (p.rq.data) norm_row<Real>(p.q, p.rq, row, p.heads.K);
    if (p.rk.data) norm_row<Real>(p.k, p.rk, row, p.heads.K);
  }
}

/// One thread an element.
template <class Real>
__global__ void __launch_bounds__(kBlock) beta(const BetaParams p) {
  const int64_t rows = p.B * p.T * p.HV;
  const int64_t used = used_tokens(p.sequences);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kBlock;
  for (int64_t i = blockIdx.x * int64_t{kBlock} + threadIdx.x; i < rows; i += step) {
    const Row row = row_of(i, p.T, p.HV);
    Real value = 0;
    if (row.token < used) {
      const Real x = load<Real>(p.logit, token_offset(p.logit, row.batch, row.token, row.head));
      value = static_cast<Real>(p.factor) * sigmoid(x);
      if (p.gradient.data) {
        value *= sigmoid(-x) *
                 load<Real>(p.gradient, token_offset(p.gradient, row.batch, row.token, row.head));
      }
    }
    store<Real>(p.result, token_offset(p.result, row.batch, row.token, row.head), value);
  }
}

/// One warp a vector of the result.
template <class Real>
__global__ void __launch_bounds__(kBlock) group_sum(const GroupSumParams p) {
  const int64_t G = p.heads.group;
  const int64_t rows = p.B * p.T * p.heads.H;
  const int64_t used = used_tokens(p.sequences);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int64_t i = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32; i < rows; i += step) {
    const Row row = row_of(i, p.T, p.heads.H);
    Lanes<Real> dy = {};
    Lanes<Real> y = {};
    const bool is_used = row.token < used;
    const bool normalised = p.r.data != nullptr;
    Real r = 1;
    Real dot = 0;
    for (int64_t g = 0; is_used && g < G; ++g) {
      Lanes<Real> part;
      load_lanes(part, p.source, token_offset(p.source, row.batch, row.token, row.head * G + g),
                 p.heads.K);
#pragma unroll
      for (int j = 0; j < kMaxK / 32; ++j) dy[j] += part[j];
    }
    if (normalised && is_used) {
      r = load<Real>(p.r, token_offset(p.r, row.batch, row.token, row.head));
      load_lanes(y, p.x, token_offset(p.x, row.batch, row.token, row.head), p.heads.K);
#pragma unroll
      for (int j = 0; j < kMaxK / 32; ++j) {
        y[j] *= r;
        dot += y[j] * dy[j];
      }
    }
    if (normalised) dot = warp_sum(dot);
    // One channel: dy lies along y, and 1 - y^2 = eps r^2 exactly, but a rounded y loses it.
    const bool single = normalised && p.heads.K == 1;
    const Real single_factor = static_cast<Real>(kNormEps) * r * r * r;
    const int64_t base = token_offset(p.target, row.batch, row.token, row.head);
    with_element(p.target.dtype, [&]<class T>(Element<T>) {
      T* target = static_cast<T*>(p.target.data) + base;
#pragma unroll
      for (int j = 0; j < kMaxK / 32; ++j) {
        const int k = lane + 32 * j;
        if (k < p.heads.K) {
          const Real dx = single ? dy[j] * single_factor : r * (dy[j] - y[j] * dot);
          target[k * p.target.stride[3]] = from_real<T>(dx);
        }
      }
    });
  }
}

int64_t blocks(int64_t items, int per_block) { return (items + per_block - 1) / per_block; }

}  // namespace

Status launch_norms(const NormsParams& p, bool fp64, cudaStream_t stream) {
  return launch({"norms", blocks(p.B * p.T * p.heads.H, kWarps), kBlock},
                fp64 ? norms<double> : norms<float>, p, stream);
}

Status launch_beta(const BetaParams& p, bool fp64, cudaStream_t stream) {
  return launch({"beta", blocks(p.B * p.T * p.HV, kBlock), kBlock},
                fp64 ? beta<double> : beta<float>, p, stream);
}

Status launch_group_sum(const GroupSumParams& p, bool fp64, cudaStream_t stream) {
  return launch({"group_sum", blocks(p.B * p.T * p.heads.H, kWarps), kBlock},
                fp64 ? group_sum<double> : group_sum<float>, p, stream);
}

}  // namespace kda::cuda
