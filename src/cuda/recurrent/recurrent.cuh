// recurrent_step: decode at the speed of memory. The state passes once through registers, whatever
// the number of tokens.
//
// Grid: (sequence, value head, p.columns columns of V: 32 or 64 to 128), one block of 4 warps each.
// It goes through them kRecurrentColumns at a time: cp.async brings the state of the next ones into
// one of two stages of shared memory while the others are computed on. Beside the first copy up to
// eight tokens are activated into shared memory, once for all columns (longer sequences: once for
// each kRecurrentColumns): q, k and decay a thread a channel, v a thread a column, then the norms
// and <q, k> a warp a token.
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
#include "cuda/tile/vector16.cuh"

namespace kda::cuda {

template <int K>
using RecurrentToken = Token<float, K, kMaxRecurrentColumns>;

/// One 16-byte vector of the state.
template <class State>
struct StateVector {
  static constexpr int kSize = Vector16<State>::kSize;
  float x[kSize];

  __device__ __forceinline__ void load(const uint4& bits) { Vector16<State>::unpack(bits, x); }
  // Streaming: a state is written once and not read again here.
  __device__ __forceinline__ void save(State* to) const {
    __stcs(reinterpret_cast<uint4*>(to), Vector16<State>::pack(x));
  }
};

/// sum += the four values at p, aligned to 16 bytes.
__device__ __forceinline__ void add4(float (&sum)[4], const float* p) {
  const float4 v = *reinterpret_cast<const float4*>(p);
  sum[0] += v.x;
  sum[1] += v.y;
  sum[2] += v.z;
  sum[3] += v.w;
}

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
    // One address that moves: eight would stay in registers from the first copy to the last store.
    State* at = static_cast<State*>(t.data) + base + v0 + column() + line(0) * t.stride[2];
    const int64_t step = kRecurrentWarps * kLinesPerWarp * t.stride[2];
#pragma unroll
    for (int r = 0; r < kRows; ++r, at += step) f(s[r], at, r);
  }

  __device__ __forceinline__ void step(RecurrentToken<K>& token, int first_column, int parity,
                                       Exchange& exchange) {
    float error[kVector] = {};
    float out[kVector] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Decay<float> decay{token.decay[line(r)], token.rest[line(r)]};
      const float k = token.k[line(r)];
      const float q = token.q[line(r)];
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        decay_element<State>(s[r].x[i], decay, k, error[i]);
        out[i] = fma(s[r].x[i], q, out[i]);
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
    auto& sums = exchange.sums[parity];
    if (threadIdx.x % 32 < kVectorLanes) {
#pragma unroll
      for (int i = 0; i < kVector; i += 4) {
        *reinterpret_cast<float4*>(&sums[warp][0][column() + i]) =
            make_float4(error[i], error[i + 1], error[i + 2], error[i + 3]);
        *reinterpret_cast<float4*>(&sums[warp][1][column() + i]) =
            make_float4(out[i], out[i + 1], out[i + 2], out[i + 3]);
      }
    }
    __syncthreads();
    float u[kVector];
    float result[kVector];
#pragma unroll
    for (int i = 0; i < kVector; i += 4) {
      float e[4] = {};
      float total[4] = {};
#pragma unroll
      for (int w = 0; w < kRecurrentWarps; ++w) {
        add4(e, &sums[w][0][column() + i]);
        add4(total, &sums[w][1][column() + i]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float v = token.v[first_column + column() + i + j];
        const float own = write_of(token.beta, token.rk, e[j], v);
        result[i + j] = output_of(token.rq, token.qk, total[j], own);
        u[i + j] = token.rk * own;
      }
    }
    if (threadIdx.x < kVectorLanes) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) token.o[first_column + column() + i] = result[i];
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float k = token.k[line(r)];
#pragma unroll
      for (int i = 0; i < kVector; ++i) s[r].x[i] = fma(k, u[i], s[r].x[i]);
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
    State* at = static_cast<State*>(t.data) + base + (v0 + line(0)) * t.stride[3] + channel(0);
    const int64_t step = kRecurrentWarps * kLinesPerWarp * t.stride[3];
#pragma unroll
    for (int r = 0; r < kRows; ++r, at += step) {
      if (v0 + line(r) >= V) continue;
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        f(s[r][j], at + channel(j) - channel(0), r * kParts + j);
      }
    }
  }

  __device__ __forceinline__ void step(RecurrentToken<K>& token, int first_column, int, Exchange&) {
    float error[kRows] = {};
    float out[kRows] = {};
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const Decay<float> decay{token.decay[channel(j) + i], token.rest[channel(j) + i]};
        const float k = token.k[channel(j) + i];
        const float q = token.q[channel(j) + i];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          decay_element<State>(s[r][j].x[i], decay, k, error[r]);
          out[r] = fma(s[r][j].x[i], q, out[r]);
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
      float u = write_of(token.beta, token.rk, error[r], token.v[first_column + line(r)]);
      if (threadIdx.x % kVectorLanes == 0) {
        token.o[first_column + line(r)] = output_of(token.rq, token.qk, out[r], u);
      }
      u *= token.rk;
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          s[r][j].x[i] = fma(token.k[channel(j) + i], u, s[r][j].x[i]);
        }
      }
    }
  }
};

template <class Layout, class State, int K>
struct RecurrentShared {
  uint4 state[kStateStages][Layout::kVectors][kRecurrentThreads];
  typename Layout::Exchange exchange;
  RecurrentToken<K> tokens[1];  ///< RecurrentParams::token_block of them
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
  state = {};
  if (!p.initial_state.data) return;
  state.each_vector(p.initial_state, 0, v0, p.heads.V,
                    [&](auto& vector, const void*, int i) { vector.load(stage[i][threadIdx.x]); });
}

/// Outputs of `count` tokens from `first` on, columns begin..end - 1 of the block.
template <int K>
__device__ __forceinline__ void save_outputs(const RecurrentToken<K>* tokens,
                                             const RecurrentParams& p, const RecurrentTile& tile,
                                             int64_t first, int count, int begin, int end) {
  const int width = end - begin;
  with_element(p.o.dtype, [&]<class T>(Element<T>) {
    for (int e = static_cast<int>(threadIdx.x); e < count * width; e += kRecurrentThreads) {
      const int slot = e / width;
      const int column = begin + e - slot * width;
      const int64_t v = tile.v0 + column;
      if (v >= p.heads.V) continue;
      const int64_t row =
          token_offset(p.o, tile.tokens.batch, tile.tokens.begin + first + slot, tile.hv);
      static_cast<T*>(p.o.data)[row + v * p.o.stride[3]] = from_real<T>(tokens[slot].o[column]);
    }
  });
}

/// All tokens for columns v0... `steps` counts tokens and columns: its parity picks the exchange.
template <class Layout, class State, int K>
__device__ __forceinline__ void advance(Layout& state, RecurrentShared<Layout, State, K>& shared,
                                        const RecurrentParams& p, const RecurrentTile& tile,
                                        int64_t v0, int stage, int& steps) {
  const int64_t length = tile.count;
  const int column = static_cast<int>(v0 - tile.v0);
  int64_t first = 0;
  do {  // once without tokens, for the state
    const int count = token_count(length, first, p.token_block);
    // One block of tokens stays for all columns.
    if (column == 0 || length > p.token_block) {
      if (first > 0 || column > 0) __syncthreads();  // nobody reads the last tokens
      load_block<State>(shared.tokens, p, tile, first, count);
    }
    // Only now: the loads of the tokens flew beside the copy of the state.
    if (first == 0) receive(state, shared.state[stage], p, v0);
    for (int slot = 0; slot < count; ++slot) {
      state.step(shared.tokens[slot], column, steps++ % 2, shared.exchange);
    }
    const int next = column + Layout::kColumns;
    const bool last = tile.v0 + next >= p.heads.V || next >= p.columns;
    if (length <= p.token_block && !last) continue;
    __syncthreads();
    save_outputs(shared.tokens, p, tile, first, count, length > p.token_block ? column : 0, next);
  } while ((first += p.token_block) < length);
}

template <class Layout, class State, int K>
__global__ void __launch_bounds__(kRecurrentThreads, kRecurrentBlocksPerSm<State>)
    recurrent_step(const __grid_constant__ RecurrentParams p) {
  constexpr int kColumns = kRecurrentColumns<State>;
  auto& shared = *shared_memory<RecurrentShared<Layout, State, K>>();
  const int64_t tiles = recurrent_tiles(p, p.columns);
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const RecurrentTile tile = recurrent_tile(p, index, p.columns);
    write_zeros<float>(p, tile, p.columns);
    if (tile.slot < 0) continue;
    const int64_t end = clamp_index(tile.v0 + p.columns, 0, p.heads.V);
    int stage = 0;
    int steps = 0;
    prefetch<Layout>(shared.state[stage], p, tile, tile.v0, end);
    for (int64_t v0 = tile.v0; v0 < end; v0 += kColumns) {
      prefetch<Layout>(shared.state[1 - stage], p, tile, v0 + kColumns, end);
      Layout state;
      advance(state, shared, p, tile, v0, stage, steps);
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
