// What a consumer warp of sm90_recurrent holds of a state in either layout, K-first or V-first, and
// how it steps it by a token. Sums run in the order of recurrent_step
// (cuda/recurrent/recurrent.cuh).
#pragma once

#include "cuda/recurrent/tokens.cuh"
#include "cuda/sm90/recurrent/config.h"
#include "cuda/tile/vector16.cuh"

namespace kda::cuda::sm90 {

/// q, k, decay and rest of channel c lie at Layout::place_of(c).
struct TokenSlot {
  float q[kDim];
  float k[kDim];
  float decay[kDim];
  float rest[kDim];
  float v[kDim];
  float beta, rq, rk, qk;
};

/// Partial sums of K-first states: [token parity][warp of rows][error or output][column].
using Sums = float[2][4][2][kDim];

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x) % 32; }
__device__ __forceinline__ int warp_id() { return static_cast<int>(threadIdx.x) / 32; }

/// Sums over lanes that differ by `step`, each lane keeping one half of them: the upper one if
/// `upper`. The result is x[0..N / 2).
template <int N>
__device__ __forceinline__ void sum_halves(float* x, int step, bool upper) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const float kept = upper ? x[N / 2 + i] : x[i];
    const float sent = upper ? x[i] : x[N / 2 + i];
    x[i] = kept + __shfl_xor_sync(~0u, sent, step);
  }
}

/// The way back: x[0..N / 2) of both lanes, in x[0..N) of both.
template <int N>
__device__ __forceinline__ void join_halves(float* x, int step, bool upper) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const float other = __shfl_xor_sync(~0u, x[i], step);
    x[N / 2 + i] = upper ? x[i] : other;
    x[i] = upper ? other : x[i];
  }
}

/// A thread's part of a K-first state [K, V]: rows row(r), columns column(i). A warp holds four
/// rows at a time of one half of the columns, four warps the sixteen rows r * 16...
template <class State>
struct KFirst {
  using Vector = Vector16<State>;
  static constexpr int kRows = 8;
  static constexpr int kColumns = 8;
  float s[kRows][kColumns];

  static __device__ __forceinline__ int quarter() { return warp_id() % 4; }
  static __device__ __forceinline__ int half() { return warp_id() / 4; }
  static __device__ __forceinline__ int row(int r) {
    return r * 16 + quarter() * 4 + lane_id() / 8;
  }
  static __device__ __forceinline__ int column(int i) {
    return half() * 64 + (i / Vector::kSize * 8 + lane_id() % 8) * Vector::kSize +
           i % Vector::kSize;
  }
  /// Channel row(r): a thread's rows lie side by side, so that it reads four at a time.
  static __device__ __forceinline__ int place(int r) {
    return (quarter() * 4 + lane_id() / 8) * kRows + r;
  }
  /// The same by the number of the channel.
  static __device__ __forceinline__ int place_of(int channel) {
    return channel % 16 * kRows + channel / 16;
  }

  template <class F>
  __device__ __forceinline__ void each_vector(State* stage, F f) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kColumns; i += Vector::kSize) {
        f(&s[r][i], reinterpret_cast<uint4*>(stage + row(r) * kDim + column(i)));
      }
    }
  }

  /// Of the four lanes of a column octet each ends its sums with two columns: `own` and the next.
  static __device__ __forceinline__ bool upper8() { return lane_id() / 8 % 2 != 0; }
  static __device__ __forceinline__ bool upper16() { return lane_id() / 16 != 0; }
  static __device__ __forceinline__ int own() {
    return column((upper8() ? 4 : 0) + (upper16() ? 2 : 0));
  }

  /// One token. `o_offset`: where its output of column `own` goes.
  __device__ __forceinline__ void step(const TokenSlot& token, Sums& sums, uint32_t parity,
                                       const Tensor& o, int64_t o_offset) {
    float error[kColumns] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Decay<float> decay{token.decay[place(r)], token.rest[place(r)]};
      const float k = token.k[place(r)];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) decay_element<State>(s[r][i], decay, k, error[i]);
    }
    sum_halves<8>(error, 8, upper8());
    sum_halves<4>(error, 16, upper16());
    float out[kColumns] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float q = token.q[place(r)];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) out[i] = fma(s[r][i], q, out[i]);
    }
    sum_halves<8>(out, 8, upper8());
    sum_halves<4>(out, 16, upper16());
    auto& mine = sums[parity][quarter()];
    *reinterpret_cast<float2*>(&mine[0][own()]) = make_float2(error[0], error[1]);
    *reinterpret_cast<float2*>(&mine[1][own()]) = make_float2(out[0], out[1]);
    barrier_sync(1 + half(), 4 * 32);
    float u[kColumns];
    write_columns(token, sums[parity], o, o_offset, u);
    join_halves<4>(u, 16, upper16());
    join_halves<8>(u, 8, upper8());
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float k = token.k[place(r)];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) s[r][i] = fma(k, u[i], s[r][i]);
    }
  }

 private:
  /// o and u of the two columns, from the sums of the four warps.
  static __device__ __forceinline__ void write_columns(const TokenSlot& token,
                                                       const float (&sums)[4][2][kDim],
                                                       const Tensor& o, int64_t o_offset,
                                                       float* u) {
    const int first = own();
    float2 error = make_float2(0, 0);
    float2 out = make_float2(0, 0);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 e = *reinterpret_cast<const float2*>(&sums[w][0][first]);
      const float2 t = *reinterpret_cast<const float2*>(&sums[w][1][first]);
      error.x += e.x;
      error.y += e.y;
      out.x += t.x;
      out.y += t.y;
    }
    const float2 v = *reinterpret_cast<const float2*>(&token.v[first]);
    u[0] = write_of(token.beta, token.rk, error.x, v.x);
    u[1] = write_of(token.beta, token.rk, error.y, v.y);
    if (quarter() == 0) {
      const float y0 = output_of(token.rq, token.qk, out.x, u[0]);
      const float y1 = output_of(token.rq, token.qk, out.y, u[1]);
      with_element(o.dtype, [&]<class T>(Element<T>) {
        T* const at = static_cast<T*>(o.data) + o_offset;
        at[0] = from_real<T>(y0);
        at[o.stride[3]] = from_real<T>(y1);
      });
    }
    u[0] *= token.rk;
    u[1] *= token.rk;
  }
};

/// A thread's part of a V-first state [V, K]: rows row(r) of V, channels channel(i) of K. Eight
/// lanes hold whole rows.
template <class State>
struct VFirst {
  using Vector = Vector16<State>;
  static constexpr int kRows = 4;
  static constexpr int kChannels = 16;
  float s[kRows][kChannels];

  static __device__ __forceinline__ int row(int r) {
    return r * 32 + warp_id() * 4 + lane_id() / 8;
  }
  static __device__ __forceinline__ int channel(int i) {
    return (i / Vector::kSize * 8 + lane_id() % 8) * Vector::kSize + i % Vector::kSize;
  }
  /// Channel i of the lane: whatever the vectors of the state, eight lanes read 128 bytes in a row.
  static __device__ __forceinline__ int place(int i) {
    return i / 4 * 32 + lane_id() % 8 * 4 + i % 4;
  }
  /// The same by the number of the channel.
  static __device__ __forceinline__ int place_of(int channel) {
    constexpr int kBlock = 8 * Vector::kSize;
    const int inside = channel % Vector::kSize;
    return channel / kBlock * kBlock + inside / 4 * 32 + channel % kBlock / Vector::kSize * 4 +
           inside % 4;
  }

  template <class F>
  __device__ __forceinline__ void each_vector(State* stage, F f) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kChannels; i += Vector::kSize) {
        f(&s[r][i], reinterpret_cast<uint4*>(stage + row(r) * kDim + channel(i)));
      }
    }
  }

  /// A lane ends its sums with one row, `own`; lanes 4 apart with the same.
  static __device__ __forceinline__ bool upper1() { return lane_id() % 2 != 0; }
  static __device__ __forceinline__ bool upper2() { return lane_id() / 2 % 2 != 0; }
  static __device__ __forceinline__ int own() {
    return row((upper1() ? 2 : 0) + (upper2() ? 1 : 0));
  }

  /// The sum over the channels of a row, in x[0].
  static __device__ __forceinline__ void sum_row(float (&x)[kRows]) {
    sum_halves<4>(x, 1, upper1());
    sum_halves<2>(x, 2, upper2());
    x[0] += __shfl_xor_sync(~0u, x[0], 4);
  }

  /// One token. `o_offset`: where its output of row `own` goes.
  __device__ __forceinline__ void step(const TokenSlot& token, Sums&, uint32_t, const Tensor& o,
                                       int64_t o_offset) {
    float error[kRows] = {};
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      const Decay<float> decay{token.decay[place(i)], token.rest[place(i)]};
      const float k = token.k[place(i)];
#pragma unroll
      for (int r = 0; r < kRows; ++r) decay_element<State>(s[r][i], decay, k, error[r]);
    }
    sum_row(error);
    float out[kRows] = {};  // while the sums of the errors travel
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      const float q = token.q[place(i)];
#pragma unroll
      for (int r = 0; r < kRows; ++r) out[r] = fma(s[r][i], q, out[r]);
    }
    const float written = write_of(token.beta, token.rk, error[0], token.v[own()]);
    float u[kRows];
    u[0] = token.rk * written;
    join_halves<2>(u, 2, upper2());
    join_halves<4>(u, 1, upper1());
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      const float k = token.k[place(i)];
#pragma unroll
      for (int r = 0; r < kRows; ++r) s[r][i] = fma(k, u[r], s[r][i]);
    }
    sum_row(out);
    if (lane_id() / 4 % 2 == 0) {
      store(o, o_offset, output_of(token.rq, token.qk, out[0], written));
    }
  }
};

}  // namespace kda::cuda::sm90
