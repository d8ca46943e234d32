// recurrent_step: decode at the speed of memory. The state passes once through registers, whatever
// the number of tokens.
//
// Grid: (sequence, value head, kRecurrentColumns columns of V), one block of 4 warps each. All
// loads of the state are issued before anything else; while they fly, warp w activates tokens w, w
// + 4,
// ... of the first eight into shared memory (q, k, decay, v, beta, <q, k>).
//
// A token needs both St^T k and St^T q. One reduction gives both, because
// S^T q = St^T q + <q, k> u.
//
// K-first states [K, V]: 8 lanes x 16 bytes cover the block's columns, a thread holds K / 16 rows;
// sums over k go through shuffles and one exchange in shared memory (two buffers in turn, so one
// barrier a token). V-first states [V, K]: 8 lanes cover 8 vectors of K, a thread holds parts of
// two or four rows of V, and shuffles suffice.
#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "cuda/recurrent/tokens.cuh"
#include "cuda/tile/shared_memory.cuh"

namespace kda::cuda {

template <int K>
using RecurrentBlock = TokenBlock<float, K, kMaxRecurrentColumns>;

/// One 16-byte vector of the state.
template <class State>
struct StateVector {
  static constexpr int kSize = kStateVector<State>;
  float x[kSize];

  __device__ __forceinline__ void load(const uint4& bits) {
    const State* values = reinterpret_cast<const State*>(&bits);
#pragma unroll
    for (int i = 0; i < kSize; ++i) x[i] = to_real<float>(values[i]);
  }
  // Streaming: a state is written once and not read again here.
  __device__ __forceinline__ void save(State* to) const {
    uint4 packed;
    State* values = reinterpret_cast<State*>(&packed);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = from_real<State>(x[i]);
    __stcs(reinterpret_cast<uint4*>(to), packed);
  }
};

/// A thread's part of a K-first state: rows line(r), columns column()...
template <class State, int K>
struct KFirstState {
  using Vector = StateVector<State>;
  static constexpr int kVector = Vector::kSize;
  static constexpr int kColumns = kRecurrentColumns<State>;
  static constexpr int kRows = K / (kRecurrentWarps * kLinesPerWarp);
  static constexpr int kVectors = kRows;  ///< of a thread
  Vector s[kRows];

  struct Exchange {
    alignas(16) float sums[2][kRecurrentWarps][2][kColumns];
  };

  static __device__ __forceinline__ int column() {
    return static_cast<int>(threadIdx.x) % kVectorLanes * kVector;
  }
  static __device__ __forceinline__ int line(int r) {
    return r * kRecurrentWarps * kLinesPerWarp + static_cast<int>(threadIdx.x) / kVectorLanes;
  }

  template <class F>
  __device__ __forceinline__ void each_vector(const Tensor& t, int64_t base, int64_t v0, int64_t V,
                                              F f) {
    if (v0 + column() >= V) return;
    State* data = static_cast<State*>(t.data) + base + v0 + column();
#pragma unroll
    for (int r = 0; r < kRows; ++r) f(s[r], data + line(r) * t.stride[2], r);
  }

  __device__ __forceinline__ void step(const RecurrentBlock<K>& block, int slot, const float* v,
                                       Exchange& exchange, float* o) {
    float error[kVector] = {};
    float out[kVector] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float decay = block.decay[slot][line(r)];
      const float k = block.k[slot][line(r)];
      const float q = block.q[slot][line(r)];
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        s[r].x[i] *= decay;
        error[i] += s[r].x[i] * k;
        out[i] += s[r].x[i] * q;
      }
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
#pragma unroll
      for (int step = kVectorLanes; step < 32; step *= 2) {
        error[i] += __shfl_xor_sync(~0u, error[i], step);
        out[i] += __shfl_xor_sync(~0u, out[i], step);
      }
    }
    const int warp = static_cast<int>(threadIdx.x) / 32;
    auto& sums = exchange.sums[slot % 2];
    if (threadIdx.x % 32 < kVectorLanes) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        sums[warp][0][column() + i] = error[i];
        sums[warp][1][column() + i] = out[i];
      }
    }
    __syncthreads();
    float u[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      float e = 0;
      float total = 0;
#pragma unroll
      for (int w = 0; w < kRecurrentWarps; ++w) {
        e += sums[w][0][column() + i];
        total += sums[w][1][column() + i];
      }
      u[i] = block.beta[slot] * (v[column() + i] - block.rk[slot] * e);
      if (threadIdx.x < kVectorLanes) {
        o[column() + i] = block.rq[slot] * total + block.qk[slot] * u[i];
      }
      u[i] *= block.rk[slot];
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float k = block.k[slot][line(r)];
#pragma unroll
      for (int i = 0; i < kVector; ++i) s[r].x[i] += k * u[i];
    }
  }
};

/// A thread's part of a V-first state: rows line(r) of V, vectors channel(j).. of K.
template <class State, int K>
struct VFirstState {
  using Vector = StateVector<State>;
  static constexpr int kVector = Vector::kSize;
  static constexpr int kColumns = kRecurrentColumns<State>;
  static constexpr int kParts = K / (kVectorLanes * kVector);
  static constexpr int kRows = kColumns / (kRecurrentWarps * kLinesPerWarp);
  static constexpr int kVectors = kRows * kParts;  ///< of a thread
  static_assert(K % (kVectorLanes * kVector) == 0);
  Vector s[kRows][kParts];

  struct Exchange {};

  static __device__ __forceinline__ int channel(int j) {
    return (j * kVectorLanes + static_cast<int>(threadIdx.x) % kVectorLanes) * kVector;
  }
  static __device__ __forceinline__ int line(int r) {
    return r * kRecurrentWarps * kLinesPerWarp + static_cast<int>(threadIdx.x) / kVectorLanes;
  }

  template <class F>
  __device__ __forceinline__ void each_vector(const Tensor& t, int64_t base, int64_t v0, int64_t V,
                                              F f) {
    State* data = static_cast<State*>(t.data) + base;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (v0 + line(r) >= V) continue;
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        f(s[r][j], data + (v0 + line(r)) * t.stride[3] + channel(j), r * kParts + j);
      }
    }
  }

  __device__ __forceinline__ void step(const RecurrentBlock<K>& block, int slot, const float* v,
                                       Exchange&, float* o) {
    float error[kRows] = {};
    float out[kRows] = {};
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float decay = block.decay[slot][channel(j) + i];
        const float k = block.k[slot][channel(j) + i];
        const float q = block.q[slot][channel(j) + i];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          s[r][j].x[i] *= decay;
          error[r] += s[r][j].x[i] * k;
          out[r] += s[r][j].x[i] * q;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int step = 1; step < kVectorLanes; step *= 2) {
        error[r] += __shfl_xor_sync(~0u, error[r], step);
        out[r] += __shfl_xor_sync(~0u, out[r], step);
      }
      float u = block.beta[slot] * (v[line(r)] - block.rk[slot] * error[r]);
      if (threadIdx.x % kVectorLanes == 0) {
        o[line(r)] = block.rq[slot] * out[r] + block.qk[slot] * u;
      }
      u *= block.rk[slot];
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) s[r][j].x[i] += block.k[slot][channel(j) + i] * u;
      }
    }
  }
};

/// Rows of o of a block of tokens, columns v0.., from shared memory.
template <int COLUMNS>
__device__ __forceinline__ void save_outputs(const RecurrentParams& p, const RecurrentTile& tile,
                                             int64_t v0, int64_t first, int count,
                                             const float (*o)[COLUMNS]) {
  with_element(p.o.dtype, [&]<class T>(Element<T>) {
    for (int e = static_cast<int>(threadIdx.x); e < count * COLUMNS; e += kRecurrentThreads) {
      const int64_t v = v0 + e % COLUMNS;
      if (v >= p.heads.V) continue;
      const int64_t offset =
          token_offset(p.o, tile.tokens.batch, tile.tokens.begin + first + e / COLUMNS, tile.hv);
      static_cast<T*>(p.o.data)[offset + v * p.o.stride[3]] =
          from_real<T>(o[e / COLUMNS][e % COLUMNS]);
    }
  });
}

template <class Layout, class State, int K>
struct RecurrentShared {
  uint4 state[kStateStages][Layout::kVectors][kRecurrentThreads];
  RecurrentBlock<K> block;
  typename Layout::Exchange exchange;
  float o[kTokenBlock][kRecurrentColumns<State>];
};

/// Starts the copy of columns v0.. of the state. A thread copies what it will itself read.
template <class Layout>
__device__ __forceinline__ void prefetch(uint4 (&stage)[Layout::kVectors][kRecurrentThreads],
                                         const RecurrentParams& p, const RecurrentTile& tile,
                                         int64_t v0, int64_t end) {
  const Tensor& t = p.initial_state;
  if (t.data && v0 < end) {
    Layout{}.each_vector(
        t, tile.slot * t.stride[0] + tile.hv * t.stride[1], v0, p.heads.V,
        [&](auto&, const void* from, int i) { copy_async_16(&stage[i][threadIdx.x], from); });
  }
  commit_copies();  // also an empty group, so that the number of groups in flight is known
}

/// Waits for the oldest copy but one and takes it.
template <class Layout>
__device__ __forceinline__ void receive(Layout& state,
                                        const uint4 (&stage)[Layout::kVectors][kRecurrentThreads],
                                        const RecurrentParams& p, int64_t v0) {
  wait_for_copies<1>();
  if (!p.initial_state.data) return;
  state.each_vector(p.initial_state, 0, v0, p.heads.V,
                    [&](auto& vector, const void*, int i) { vector.load(stage[i][threadIdx.x]); });
}

/// All tokens for columns v0...
template <class Layout, class State, int K>
__device__ __forceinline__ void advance(Layout& state, RecurrentShared<Layout, State, K>& shared,
                                        const RecurrentParams& p, const RecurrentTile& tile,
                                        int64_t v0, int stage) {
  const int64_t length = tile.tokens.end - tile.tokens.begin;
  const int column = static_cast<int>(v0 - tile.v0);
  if (length == 0) receive(state, shared.state[stage], p, v0);
  for (int64_t first = 0; first < length; first += kTokenBlock) {
    const int count = token_count(length, first);
    // One block of tokens stays for all columns.
    if (column == 0 || length > kTokenBlock) load_block(shared.block, p, tile, first, count);
    // Only now: the loads of the tokens flew beside the copy of the state.
    if (first == 0) receive(state, shared.state[stage], p, v0);
    for (int slot = 0; slot < count; ++slot) {
      state.step(shared.block, slot, shared.block.v[slot] + column, shared.exchange,
                 shared.o[slot]);
    }
    __syncthreads();
    save_outputs(p, tile, v0, first, count, shared.o);
    __syncthreads();
  }
}

template <class Layout, class State, int K>
__global__ void __launch_bounds__(kRecurrentThreads, kRecurrentBlocksPerSm<State>)
    recurrent_step(const __grid_constant__ RecurrentParams p) {
  constexpr int kColumns = kRecurrentColumns<State>;
  auto& shared = *shared_memory<RecurrentShared<Layout, State, K>>();
  const int64_t tiles = recurrent_tiles(p, p.columns);
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const RecurrentTile tile = recurrent_tile(p, index, p.columns);
    if (tile.slot < 0) {
      write_zeros<float>(p, tile, p.columns);
      continue;
    }
    const int64_t end = clamp_index(tile.v0 + p.columns, 0, p.heads.V);
    int stage = 0;
    prefetch<Layout>(shared.state[stage], p, tile, tile.v0, end);
    for (int64_t v0 = tile.v0; v0 < end; v0 += kColumns) {
      prefetch<Layout>(shared.state[1 - stage], p, tile, v0 + kColumns, end);
      Layout state{};
      advance(state, shared, p, tile, v0, stage);
      const Tensor& t = p.final_state;
      if (t.data) {
        state.each_vector(t, tile.slot * t.stride[0] + tile.hv * t.stride[1], v0, p.heads.V,
                          [](const auto& vector, auto* to, int) { vector.save(to); });
      }
      stage = 1 - stage;
    }
    __syncthreads();
  }
}

}  // namespace kda::cuda
