// Section 3 behind the chunks: the gradients of q, k, beta and the gate as the caller gave them.
#include "cuda/generic/chunk_launch.h"
#include "cuda/generic/stages.h"
#include "cuda/launch.h"
#include "cuda/tile/gate.cuh"
#include "cuda/tile/gate_rows.cuh"
#include "cuda/tile/lanes.cuh"
#include "cuda/tile/sequence.cuh"

namespace kda::cuda {
namespace {

constexpr int kBlock = 256;
constexpr int kColumns = 32;
constexpr int kGroups = kBlock / kColumns;

/// Row (batch, token, head) of a tensor [B, T, heads, ...].
struct Row {
  int64_t batch, token, head;
};

__device__ Row row_of(int64_t index, int64_t T, int64_t heads) {
  return {index / heads / T, index / heads % T, index % heads};
}

/// One vector of the result: zeros where no sequence owns the row.
template <class Real>
__device__ void sum_group(const GroupSums::Job& job, const Heads& heads, const Row& row,
                          bool is_used) {
  const int64_t G = heads.group;
  Lanes<Real> dy = {};
  Lanes<Real> y = {};
  const bool normalised = job.r.data != nullptr;
  Real r = 1;
  Real dot = 0;
  for (int64_t g = 0; is_used && g < G; ++g) {
    Lanes<Real> part;
    load_lanes(part, job.source, token_offset(job.source, row.batch, row.token, row.head * G + g),
               heads.K);
#pragma unroll
    for (int j = 0; j < kMaxLaneChannels / 32; ++j) dy[j] += part[j];
  }
  if (normalised && is_used) {
    r = load<Real>(job.r, token_offset(job.r, row.batch, row.token, row.head));
    load_lanes(y, job.x, token_offset(job.x, row.batch, row.token, row.head), heads.K);
#pragma unroll
    for (int j = 0; j < kMaxLaneChannels / 32; ++j) {
      y[j] *= r;
      dot += y[j] * dy[j];
    }
  }
  if (normalised) dot = warp_sum(dot);
  // One channel: dy lies along y, and 1 - y^2 = eps r^2 exactly, but a rounded y loses it.
  const bool single = normalised && heads.K == 1;
  const Real single_factor = static_cast<Real>(kNormEps) * r * r * r;
  const int64_t base = token_offset(job.target, row.batch, row.token, row.head);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  with_element(job.target.dtype, [&]<class T>(Element<T>) {
    T* target = static_cast<T*>(job.target.data) + base;
#pragma unroll
    for (int j = 0; j < kMaxLaneChannels / 32; ++j) {
      const int k = lane + 32 * j;
      if (k >= heads.K) continue;
      const Real dx = single ? dy[j] * single_factor : r * (dy[j] - y[j] * dot);
      target[k * job.target.stride[3]] = from_real<T>(dx);
    }
  });
}

/// One warp a vector, the vectors of one job after those of the other, spread over all blocks.
template <class Real>
__device__ void sum_groups(const GroupSums& p, const Heads& heads, const Sequences& sequences) {
  const int64_t rows = p.B * p.T * heads.H;
  const int64_t used = used_tokens(sequences);
  const int64_t warps = blockDim.x / 32;
  for (int64_t i = blockIdx.x * warps + threadIdx.x / 32; i < p.count * rows;
       i += gridDim.x * warps) {
    const int job = i < rows ? 0 : 1;
    const Row row = row_of(i - job * rows, p.T, heads.H);
    sum_group<Real>(p.jobs[job], heads, row, row.token < used);
  }
}

template <class Real>
__device__ GateGradient<Real> gate_gradient(const GateParams& params, const Gate<Real>& gate,
                                            Real raw, Real dg) {
  const Real g = gate_value(params, gate, raw);
  // Where dg is 0 its factor may be infinite, and where dz is 0 z may be.
  if (g < static_cast<Real>(kGateFloor) || dg == 0) return {0, 0};
  const Real z = raw + gate.bias;
  const Real dz = dg * gate_derivative(params, gate, z, g);
  if (params.kind == kGateSoftplus) return {dz, dg * g};
  return {dz, dz == 0 || z == 0 ? 0 : dz * z};
}

/// Block-wide sum in fixed order; valid in thread 0.
template <class Real>
__device__ Real block_sum(Real x, Real* shared) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  Real sum = 0;
  for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) sum += shared[w];
  __syncthreads();
  return sum;
}

/// Sums of dz and of dA_log over a chunk's rows of one channel.
template <class Real>
struct GateSums {
  Real bias = 0;
  Real slope = 0;
};

template <class Real>
__device__ GateSums<Real> channel_gradient(const ActivateBackwardParams& p, const Chunk& chunk,
                                           int64_t hv, int k) {
  const Gate<Real> gate = gate_of<Real>(p.gate, hv, k);
  const Tensor& g = p.gate.g;
  const int64_t raw_base = token_offset(g, chunk.batch, chunk.begin, hv) + k * g.stride[3];
  const int64_t decay_base =
      token_offset(p.dg_decay, chunk.batch, chunk.begin, hv) + k * p.dg_decay.stride[3];
  const int64_t dg_base = token_offset(p.dg, chunk.batch, chunk.begin, hv) + k * p.dg.stride[3];
  GateSums<Real> sums;
  for (int base = 0; base < chunk.rows; base += kGateBatch) {
    Real raw[kGateBatch];
    Real dg[kGateBatch];
    load_batch(raw, g, raw_base, base, chunk.rows);
    load_batch(dg, p.dg_decay, decay_base, base, chunk.rows);
#pragma unroll
    for (int j = 0; j < kGateBatch; ++j) {
      if (base + j >= chunk.rows) break;
      const GateGradient<Real> gradient = gate_gradient(p.gate, gate, raw[j], dg[j]);
      if (p.dg.data) store<Real>(p.dg, dg_base + (base + j) * p.dg.stride[1], gradient.dz);
      sums.bias += gradient.dz;
      sums.slope += gradient.dA_log;
    }
  }
  return sums;
}

/// (3.13), one thread a row.
template <class Real>
__device__ void beta_gradient(const ActivateBackwardParams& p, const Chunk& chunk, int64_t hv) {
  for (int i = static_cast<int>(threadIdx.x); i < chunk.rows; i += static_cast<int>(blockDim.x)) {
    const int64_t token = chunk.begin + i;
    const Real x = load<Real>(p.logit, token_offset(p.logit, chunk.batch, token, hv));
    const Real dbeta = load<Real>(p.dbeta, token_offset(p.dbeta, chunk.batch, token, hv));
    store<Real>(p.dlogit, token_offset(p.dlogit, chunk.batch, token, hv),
                static_cast<Real>(p.beta_factor) * sigmoid(x) * (sigmoid(-x) * dbeta));
  }
}

/// One block a chunk and value head, one thread a key channel; then the groups' sums.
template <class Real>
__global__ void __launch_bounds__(kGateThreads)
    activate_bwd(const __grid_constant__ ActivateBackwardParams p) {
  __shared__ Real shared[kGateThreads / 32];
  const int64_t tiles = p.sequences.chunk_rows * p.heads.HV;
  const int k = static_cast<int>(threadIdx.x);
  const bool gates = p.dg.data || p.partial.data;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t hv = tile % p.heads.HV;
    const Chunk chunk = chunk_of(p.sequences, tile / p.heads.HV);
    GateSums<Real> sums;
    if (gates && k < p.heads.K) sums = channel_gradient<Real>(p, chunk, hv, k);
    if (p.dlogit.data) beta_gradient<Real>(p, chunk, hv);
    if (!p.partial.data) continue;
    Real* partial = static_cast<Real*>(p.partial.data) + tile * (p.heads.K + 1);
    if (k < p.heads.K) partial[k] = sums.bias;
    const Real slope_sum = block_sum(sums.slope, shared);
    if (k == 0) partial[p.heads.K] = slope_sum;
  }
  if (p.groups.count > 0) sum_groups<Real>(p.groups, p.heads, p.sequences);
}

/// One block 32 columns of a value head's K + 1; eight interleaved sums, then one.
template <class Real>
__global__ void __launch_bounds__(kBlock) gate_reduce(const GateReduceParams p) {
  __shared__ Real shared[kGroups][kColumns];
  const int32_t width = p.heads.K + 1;
  const int32_t blocks = (width + kColumns - 1) / kColumns;
  const int column_in_block = static_cast<int>(threadIdx.x) % kColumns;
  const int group = static_cast<int>(threadIdx.x) / kColumns;
  const Real* partial = static_cast<const Real*>(p.partial.data);
  for (int64_t tile = blockIdx.x; tile < p.heads.HV * blocks; tile += gridDim.x) {
    const int64_t hv = tile / blocks;
    const int64_t column = tile % blocks * kColumns + column_in_block;
    Real sum = 0;
    if (column < width) {
      for (int64_t row = group; row < p.chunk_rows; row += kGroups) {
        sum += partial[(row * p.heads.HV + hv) * width + column];
      }
    }
    shared[group][column_in_block] = sum;
    __syncthreads();
    if (group == 0 && column < width) {
      sum = 0;
      for (int j = 0; j < kGroups; ++j) sum += shared[j][column_in_block];
      if (column == p.heads.K) {
        if (p.dA_log.data) store<Real>(p.dA_log, hv * p.dA_log.stride[0], sum);
      } else if (p.ddt_bias.data) {
        store<Real>(p.ddt_bias, hv * p.ddt_bias.stride[0] + column * p.ddt_bias.stride[1], sum);
      }
    }
    __syncthreads();
  }
}

}  // namespace

Status launch_activate_bwd(const ActivateBackwardParams& p, bool fp64, cudaStream_t stream) {
  return launch_chunks("activate_bwd", activate_bwd<float>, activate_bwd<double>,
                       channel_threads(p.heads.K), 0, p, fp64, stream);
}

Status launch_gate_reduce(const GateReduceParams& p, bool fp64, cudaStream_t stream) {
  const int64_t blocks = (p.heads.K + 1 + kColumns - 1) / kColumns;
  return launch({"gate_reduce", p.heads.HV * blocks, kBlock},
                fp64 ? gate_reduce<double> : gate_reduce<float>, p, stream);
}

}  // namespace kda::cuda
