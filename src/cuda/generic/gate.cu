// Gates: activation with the sum inside the chunk, and its gradient. One block a chunk and value
// head, one thread a key channel.
#include "cuda/generic/stages.h"
#include "cuda/launch.h"
#include "cuda/tile/gate.cuh"
#include "cuda/tile/sequence.cuh"

namespace kda::cuda {
namespace {

constexpr int kBlock = 256;
constexpr int kColumns = 32;
constexpr int kGroups = kBlock / kColumns;
// Rows whose loads are in flight together.
constexpr int kBatch = 8;

/// Rows base.. of one channel, the last valid row again beyond it.
template <class Real>
__device__ __forceinline__ void load_batch(Real (&x)[kBatch], const Tensor& t, int64_t offset,
                                           int base, int rows) {
  with_element(t.dtype, [&]<class T>(Element<T>) {
    const T* data = static_cast<const T*>(t.data) + offset;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = base + j < rows ? base + j : rows - 1;
      x[j] = to_real<Real>(data[i * t.stride[1]]);
    }
  });
}

template <class Real>
__global__ void __launch_bounds__(kBlock) gate_cumsum(const GateCumsumParams p) {
  const int64_t tiles = p.sequences.chunk_rows * p.heads.HV;
  const int k = static_cast<int>(threadIdx.x);
  if (k >= p.heads.K) return;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t hv = tile % p.heads.HV;
    const Chunk chunk = chunk_of(p.sequences, tile / p.heads.HV);
    if (chunk.rows == 0) continue;
    const Gate<Real> gate = gate_of<Real>(p.gate, hv, k);
    const Tensor& g = p.gate.g;
    const int64_t from = token_offset(g, chunk.batch, chunk.begin, hv) + k * g.stride[3];
    const int64_t to = token_offset(p.gamma, chunk.batch, chunk.begin, hv) + k * p.gamma.stride[3];
    // In fp64: 64 roundings of a sum near -40 x 64 would show in dA_log, and one rounding does not.
    double sum = 0;
    for (int base = 0; base < chunk.rows; base += kBatch) {
      Real raw[kBatch];
      load_batch(raw, g, from, base, chunk.rows);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (base + j >= chunk.rows) break;
        sum += clamp_gate(gate_value(p.gate, gate, raw[j]));
        store<Real>(p.gamma, to + (base + j) * p.gamma.stride[1], sum * static_cast<Real>(kInvLn2));
      }
    }
  }
}

/// What a token adds to a channel's parameter gradients.
template <class Real>
struct GateGradient {
  Real dz;      ///< of the raw input and the bias
  Real dA_log;  ///< (3.6), (3.10)
};

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

template <class Real>
__global__ void __launch_bounds__(kBlock) gate_bwd(const GateBackwardParams p) {
  __shared__ Real shared[kBlock / 32];
  const int64_t tiles = p.sequences.chunk_rows * p.heads.HV;
  const int k = static_cast<int>(threadIdx.x);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t hv = tile % p.heads.HV;
    const Chunk chunk = chunk_of(p.sequences, tile / p.heads.HV);
    Real bias_sum = 0;
    Real slope_sum = 0;
    if (k < p.heads.K) {
      const Gate<Real> gate = gate_of<Real>(p.gate, hv, k);
      const Tensor& g = p.gate.g;
      const int64_t raw_base = token_offset(g, chunk.batch, chunk.begin, hv) + k * g.stride[3];
      const int64_t decay_base =
          token_offset(p.dg_decay, chunk.batch, chunk.begin, hv) + k * p.dg_decay.stride[3];
      const int64_t dg_base = token_offset(p.dg, chunk.batch, chunk.begin, hv) + k * p.dg.stride[3];
      for (int base = 0; base < chunk.rows; base += kBatch) {
        Real raw[kBatch];
        Real dg[kBatch];
        load_batch(raw, g, raw_base, base, chunk.rows);
        load_batch(dg, p.dg_decay, decay_base, base, chunk.rows);
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          if (base + j >= chunk.rows) break;
          const GateGradient<Real> gradient = gate_gradient(p.gate, gate, raw[j], dg[j]);
          if (p.dg.data) store<Real>(p.dg, dg_base + (base + j) * p.dg.stride[1], gradient.dz);
          bias_sum += gradient.dz;
          slope_sum += gradient.dA_log;
        }
      }
    }
    if (!p.partial.data) continue;
    Real* partial = static_cast<Real*>(p.partial.data) + tile * (p.heads.K + 1);
    if (k < p.heads.K) partial[k] = bias_sum;
    slope_sum = block_sum(slope_sum, shared);
    if (k == 0) partial[p.heads.K] = slope_sum;
  }
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

int32_t channel_threads(int32_t K) { return (K + 31) / 32 * 32; }

}  // namespace

Status launch_gate_cumsum(const GateCumsumParams& p, bool fp64, cudaStream_t stream) {
  return launch({"gate_cumsum", p.sequences.chunk_rows * p.heads.HV, channel_threads(p.heads.K)},
                fp64 ? gate_cumsum<double> : gate_cumsum<float>, p, stream);
}

Status launch_gate_bwd(const GateBackwardParams& p, bool fp64, cudaStream_t stream) {
  return launch({"gate_bwd", p.sequences.chunk_rows * p.heads.HV, channel_threads(p.heads.K)},
                fp64 ? gate_bwd<double> : gate_bwd<float>, p, stream);
}

Status launch_gate_reduce(const GateReduceParams& p, bool fp64, cudaStream_t stream) {
  const int64_t blocks = (p.heads.K + 1 + kColumns - 1) / kColumns;
  return launch({"gate_reduce", p.heads.HV * blocks, kBlock},
                fp64 ? gate_reduce<double> : gate_reduce<float>, p, stream);
}

}  // namespace kda::cuda
