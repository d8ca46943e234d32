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

template <class Real>
struct StateTile {
  /// Columns of V a block: in fp64 half, so that K = 256 fits the 99 KB of sm_86.
  static constexpr int kColumns = sizeof(Real) == 4 ? 32 : 16;
  static constexpr int kStride = kColumns + 4;
  using Tokens = Accumulator<Real, 4, kColumns / 16>;  ///< 64 tokens x kColumns
  using Keys = Accumulator<Real, 4, kColumns / 16>;    ///< 64 channels x kColumns

  Real* data;  ///< [padded K][kStride]
  int32_t K;

  static __host__ __device__ int32_t padded(int32_t K) {
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

  /// sum += keys S for a chunk's keys [tokens, K]. The next panel loads while one is multiplied.
  __device__ void add_keys_times_state(Tokens& sum, const Tensor& keys, const Chunk& chunk,
                                       int64_t hv, Real* shared) const {
    Panel<Real, kTileRows, kStateDepth, true> panel;
    load_tokens(panel, keys, chunk, hv, 0, K);
    for (int k0 = 0; k0 < K; k0 += kStateDepth) {
      __syncthreads();
      panel.put(shared);
      __syncthreads();
      if (k0 + kStateDepth < K) load_tokens(panel, keys, chunk, hv, k0 + kStateDepth, K);
      sum.add_product(shared, kPanelStride, data + k0 * kStride, kStride, kStateDepth);
    }
  }

  /// sum += factor x^T y for channels k0.. of x [tokens, K] and y [64][kStride] in shared memory.
  __device__ void add_tokens_product(Keys& sum, const Tensor& x, const Chunk& chunk, int64_t hv,
                                     int k0, const Real* y, Real factor, Real* shared) const {
    Panel<Real, kTileRows, kStateDepth, false> panel;
    load_tokens(panel, x, chunk, hv, k0, K);
    for (int i0 = 0; i0 < chunk.rows; i0 += kStateDepth) {
      panel.map([&](int, int, Real value) { return factor * value; });
      __syncthreads();
      panel.put(shared);
      __syncthreads();
      if (i0 + kStateDepth < chunk.rows) {
        load_tokens(panel, x, chunk, hv, k0, K, i0 + kStateDepth);
      }
      sum.add_product(shared, kPanelStride, y + i0 * kStride, kStride, kStateDepth);
    }
  }

  /// S = 2^decay . S + sum(k0) for each 64 channels, once every thread is done with the old state.
  template <class F>
  __device__ void update(const Real* decay, F add) const {
    for (int k0 = 0; k0 < K; k0 += kTileRows) {
      Keys sum;
      add(sum, k0);
      sum.map([&](int m, int n, Real x) {
        Real& s = data[(k0 + m) * kStride + n];
        s = exp2_of(decay[k0 + m]) * s + x;
        return x;
      });
    }
  }
};

/// Launches the instance for the type with shared memory for a state tile and `token_tiles` tiles
/// [64][BV + 4].
template <class Params>
Status launch_state_kernel(const char* name, void (*fp32)(Params), void (*fp64_kernel)(Params),
                           int token_tiles, const Params& p, bool fp64, cudaStream_t stream) {
  const auto shape = [&]<class Real>(Real) {
    using Tile = StateTile<Real>;
    const int64_t elements = kStatePanel + kMaxK + token_tiles * kTileRows * Tile::kStride +
                             Tile::padded(p.heads.K) * Tile::kStride;
    const int64_t v_tiles = (p.heads.V + Tile::kColumns - 1) / Tile::kColumns;
    return LaunchShape{name, p.sequences.count * p.heads.HV * v_tiles, kThreads,
                       static_cast<std::size_t>(elements) * sizeof(Real)};
  };
  return fp64 ? launch(shape(double{}), fp64_kernel, p, stream)
              : launch(shape(float{}), fp32, p, stream);
}

}  // namespace kda::cuda
