// K x BV of a running state in shared memory, and the two products of a scan with it.
#pragma once

#include "cuda/launch.h"
#include "cuda/tile/chunk_tile.cuh"
#include "cuda/tile/gate.cuh"

namespace kda::cuda {

inline constexpr int kMaxK = 256;
inline constexpr int kStateDepth = 32;
inline constexpr int kStatePanel = kStateDepth * kPanelStride;

__device__ __forceinline__ Chunk chunk_in(const TokenRange& range, int64_t c, int32_t C) {
  const int64_t begin = range.begin + c * C;
  const int64_t rest = range.end - begin;
  return {range.batch, begin, static_cast<int32_t>(rest < C ? rest : C)};
}

/// A block's share of a scan: columns v0.. of one value head of one sequence.
struct ScanTile {
  int64_t v0;
  int64_t hv;
  int64_t sequence;
  TokenRange range;
};

__device__ __forceinline__ int64_t scan_tiles(const Sequences& sequences, const Heads& heads,
                                              int columns) {
  return sequences.count * heads.HV * ((heads.V + columns - 1) / columns);
}

__device__ __forceinline__ ScanTile scan_tile(const Sequences& sequences, const Heads& heads,
                                              int columns, int64_t index) {
  const int64_t v_tiles = (heads.V + columns - 1) / columns;
  const int64_t sequence = index / v_tiles / heads.HV;
  return {index % v_tiles * columns, index / v_tiles % heads.HV, sequence,
          chunks_of(sequences, sequence)};
}

/// gamma of the chunk's last row, a channel a thread; loaded long before it is put into shared
/// memory.
template <class Real>
__device__ __forceinline__ Real last_gamma(const Tensor& gamma, const Chunk& chunk, int64_t hv,
                                           int32_t K) {
  static_assert(kThreads == kMaxK);
  const int k = static_cast<int>(threadIdx.x);
  if (k >= K) return 0;
  return load<Real>(gamma, token_offset(gamma, chunk.batch, chunk.begin + chunk.rows - 1, hv) +
                               k * gamma.stride[3]);
}

/// 2^gamma of a chunk as the sum of two numbers a channel, in shared memory. One alone loses the
/// same in every chunk of equal gates.
template <class Real>
struct ChunkDecay {
  static constexpr int kSize = 2 * kMaxK;

  Real* factor;
  Real* rest;

  __device__ explicit ChunkDecay(Real* base) : factor(base), rest(base + kMaxK) {}

  /// A channel a thread. Below 2^-0.5 few chunks share a state, and one number is enough.
  __device__ void put(Real gamma) const {
    const Real power = exp2_of(gamma);
    factor[threadIdx.x] = power;
    rest[threadIdx.x] =
        gamma > Real(-0.5) ? expm1(gamma * Real(1 / kInvLn2)) - (power - 1) : Real(0);
  }
};

/// Every product takes its first panel loaded, and calls `next` to start the loads of the panel
/// that the following one begins with, so that they arrive under a product and not in front of one.
template <class Real, int COLUMNS>
struct StateTile {
  static constexpr int kColumns = COLUMNS;  ///< of V a block
  static constexpr int kStride = kColumns + 4;
  using Tokens = Accumulator<Real, 4, kColumns / 16>;              ///< 64 tokens x kColumns
  using Keys = Accumulator<Real, 4, kColumns / 16>;                ///< 64 channels x kColumns
  using RowPanel = Panel<Real, kTileRows, kStateDepth, true>;      ///< tokens x 32 channels
  using ColumnPanel = Panel<Real, kTileRows, kStateDepth, false>;  ///< columns x 32 tokens

  Real* data;  ///< [padded K][kStride]
  int32_t K;

  static __device__ int32_t padded(int32_t K) {
    return (K + kTileRows - 1) / kTileRows * kTileRows;
  }

  /// Elements (k, v0 + c) of state `index`, 0 where there is none.
  __device__ void load(const Tensor& t, int64_t index, int64_t hv, int64_t v0, int64_t V) const {
    const int64_t base = index * t.stride[0] + hv * t.stride[1] + v0 * t.stride[3];
    const int cols = rest_of(V, v0);
    for (int e = static_cast<int>(threadIdx.x); e < padded(K) * kColumns; e += kThreads) {
      const int k = e / kColumns;
      const int c = e % kColumns;
      data[k * kStride + c] = t.data && k < K && c < cols
                                  ? cuda::load<Real>(t, base + k * t.stride[2] + c * t.stride[3])
                                  : Real(0);
    }
  }

  __device__ void save(const Tensor& t, int64_t index, int64_t hv, int64_t v0, int64_t V) const {
    const int64_t base = index * t.stride[0] + hv * t.stride[1] + v0 * t.stride[3];
    const int cols = rest_of(V, v0);
    with_element(t.dtype, [&]<class T>(Element<T>) {
      T* to = static_cast<T*>(t.data) + base;
      for (int e = static_cast<int>(threadIdx.x); e < K * kColumns; e += kThreads) {
        const int k = e / kColumns;
        const int c = e % kColumns;
        if (c < cols) to[k * t.stride[2] + c * t.stride[3]] = from_real<T>(data[k * kStride + c]);
      }
    });
  }

  /// sum += keys S for a chunk's keys [tokens, K], of which `panel` holds channels 0...
  template <class Next>
  __device__ void add_keys_times_state(Tokens& sum, RowPanel& panel, const Tensor& keys,
                                       const Chunk& chunk, int64_t hv, Real* shared,
                                       Next next) const {
    for (int k0 = 0; k0 < K; k0 += kStateDepth) {
      __syncthreads();
      panel.put(shared);
      __syncthreads();
      if (k0 + kStateDepth < K) {
        load_tokens(panel, keys, chunk, hv, k0 + kStateDepth, K);
      } else {
        next();
      }
      sum.add_product(shared, kPanelStride, data + k0 * kStride, kStride, kStateDepth);
    }
  }

  /// sum += factor x^T y for channels k0.. of x [tokens, K], of which `panel` holds the first
  /// tokens, and y [64][kStride] in shared memory.
  template <class Next>
  __device__ void add_tokens_product(Keys& sum, ColumnPanel& panel, const Tensor& x,
                                     const Chunk& chunk, int64_t hv, int k0, const Real* y,
                                     Real factor, Real* shared, Next next) const {
    for (int i0 = 0; i0 < chunk.rows; i0 += kStateDepth) {
      panel.map([&](int, int, Real value) { return factor * value; });
      __syncthreads();
      panel.put(shared);
      __syncthreads();
      if (i0 + kStateDepth < chunk.rows) {
        load_tokens(panel, x, chunk, hv, k0, K, i0 + kStateDepth);
      } else {
        next();
      }
      sum.add_product(shared, kPanelStride, y + i0 * kStride, kStride, kStateDepth);
    }
  }

  /// S = decay . S + sum(k0) for each 64 channels, once every thread is done with the old state.
  template <class F>
  __device__ void update(const ChunkDecay<Real>& decay, F add) const {
    for (int k0 = 0; k0 < K; k0 += kTileRows) {
      Keys sum;
      add(sum, k0);
      sum.map([&](int m, int n, Real x) {
        Real& s = data[(k0 + m) * kStride + n];
        s = fma(decay.factor[k0 + m], s, fma(decay.rest[k0 + m], s, x));
        return x;
      });
    }
  }
};

/// Columns of V a block, which change no bit of the result. fp64 takes few, so that K = 256 fits
/// the 99 KB of sm_86.
inline constexpr int kFp64Columns = 16;
inline constexpr int kNarrowColumns = 32;
/// Half the blocks, each with twice the arithmetic for a panel; with K up to 128, so that two share
/// an SM of Hopper and one fits sm_86.
inline constexpr int kWideColumns = 64;
/// Taken where as many blocks stay as a large GPU has SMs.
inline constexpr int64_t kEnoughBlocks = 128;

/// The kernels for the types and widths.
template <class Params>
struct StateKernels {
  const char* name;
  void (*wide)(Params);
  void (*narrow)(Params);
  void (*fp64)(Params);
  int token_tiles;  ///< tiles [64][columns + 4] in shared memory beside the state
};

template <class Params>
Status launch_state_kernel(const StateKernels<Params>& kernels, const Params& p, bool fp64,
                           cudaStream_t stream) {
  const auto blocks = [&](int columns) {
    return p.sequences.count * p.heads.HV * ((p.heads.V + columns - 1) / columns);
  };
  const bool wide =
      p.heads.V > kNarrowColumns && p.heads.K <= kMaxK / 2 && blocks(kWideColumns) >= kEnoughBlocks;
  const int columns = fp64 ? kFp64Columns : wide ? kWideColumns : kNarrowColumns;
  const int64_t padded_K = (p.heads.K + kTileRows - 1) / kTileRows * kTileRows;
  const int64_t elements = kStatePanel + ChunkDecay<float>::kSize +
                           (kernels.token_tiles * kTileRows + padded_K) * (columns + 4);
  const std::size_t size = fp64 ? sizeof(double) : sizeof(float);
  return launch(
      {kernels.name, blocks(columns), kThreads, static_cast<std::size_t>(elements) * size},
      fp64   ? kernels.fp64
      : wide ? kernels.wide
             : kernels.narrow,
      p, stream);
}

}  // namespace kda::cuda
