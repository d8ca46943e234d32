// What both recurrent kernels share: which sequence a block works for, and the activated inputs of
// a block of tokens in shared memory.
#pragma once

#include "cuda/recurrent/config.h"
#include "cuda/recurrent/recurrent.h"
#include "cuda/tile/gate.cuh"
#include "cuda/tile/sequence.cuh"

namespace kda::cuda {

/// A block's share: tokens of one sequence, one value head, columns v0.. of V. `slot` < 0: no state
/// is touched and o is zero; packed problems have one such sequence more, for the unused rows.
struct RecurrentTile {
  TokenRange tokens;
  int64_t count;  ///< the first so many of them run; the rest of o is zero
  int64_t hv;
  int64_t v0;
  int64_t slot;
};

struct Quotient {
  int64_t quotient;
  int64_t rest;
};

/// In 32 bits where that is enough: a 64-bit division is some hundred instructions.
__device__ __forceinline__ Quotient divide(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) {
    const uint32_t quotient = static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
    return {quotient, static_cast<uint32_t>(a) - quotient * static_cast<uint32_t>(b)};
  }
  return {a / b, a % b};
}

__device__ __forceinline__ int64_t recurrent_tiles(const RecurrentParams& p, int columns) {
  const int64_t v_tiles = (p.heads.V + columns - 1) / columns;
  return (p.sequences.count + (p.sequences.cu.data ? 1 : 0)) * p.heads.HV * v_tiles;
}

__device__ __forceinline__ RecurrentTile recurrent_tile(const RecurrentParams& p, int64_t index,
                                                        int columns) {
  const Quotient by_columns = divide(index, (p.heads.V + columns - 1) / columns);
  const Quotient by_head = divide(by_columns.quotient, p.heads.HV);
  const int64_t sequence = by_head.quotient;
  RecurrentTile tile;
  tile.v0 = by_columns.rest * columns;
  tile.hv = by_head.rest;
  tile.slot = -1;
  tile.count = 0;
  if (sequence == p.sequences.count) {
    tile.tokens = {0, used_tokens(p.sequences), p.sequences.T, 0, 0};
    return tile;
  }
  tile.tokens = tokens_of(p.sequences, sequence);
  const int64_t slot = p.indices.data ? load_index(p.indices, sequence) : sequence;
  const int64_t length = tile.tokens.end - tile.tokens.begin;
  const int64_t count = p.num_accepted.data ? load_index(p.num_accepted, sequence) : length;
  const bool valid = slot >= 0 && slot < p.states && count >= 0 && count <= length;
  if (!valid || (count == 0 && !p.copies_states)) return tile;
  tile.slot = slot;
  tile.count = count;
  return tile;
}

/// How many tokens of `length` a block of up to `block` from `first` on holds; 0 from `length` on.
__device__ __forceinline__ int token_count(int64_t length, int64_t first, int block) {
  return static_cast<int>(clamp_index(length - first, 0, block));
}

/// Zeros in o for the tokens of a tile that do not run. Of `threads` threads this is number
/// `thread`.
template <class Real>
__device__ void write_zeros(const RecurrentParams& p, const RecurrentTile& tile, int columns,
                            int thread, int threads) {
  const int64_t first = tile.tokens.begin + tile.count;
  const int64_t count = (tile.tokens.end - first) * columns;
  for (int64_t e = thread; e < count; e += threads) {
    const int64_t v = tile.v0 + e % columns;
    if (v >= p.heads.V) continue;
    store<Real>(
        p.o, token_offset(p.o, tile.tokens.batch, first + e / columns, tile.hv) + v * p.o.stride[3],
        Real(0));
  }
}

template <class Real>
__device__ __forceinline__ void write_zeros(const RecurrentParams& p, const RecurrentTile& tile,
                                            int columns) {
  write_zeros<Real>(p, tile, columns, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x));
}

/// Inputs of a token. The norms of q and k are factors of their own.
template <class Real, int K, int COLUMNS>
struct alignas(16) Token {
  Real q[K];
  Real k[K];
  Real decay[K];
  Real rest[K];  ///< what decay lacks of the factor, with kTwoFactors
  Real v[COLUMNS];
  Real o[COLUMNS];  ///< the result
  Real beta;
  Real rq;  ///< 1 / |q| times the scale
  Real rk;
  Real qk;  ///< <q, k> with both factors
};

template <class Real>
__device__ __forceinline__ Real lane_sum(Real x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

/// Sums over channels, from which the factors of q and k follow.
template <class Real>
struct Products {
  Real qq = 0, kk = 0, qk = 0;

  __device__ __forceinline__ void add(Real q, Real k) {
    qq = fma(q, q, qq);
    kk = fma(k, k, kk);
    qk = fma(q, k, qk);
  }
};

/// The factors rq, rk, qk of a token from the sums of a warp's lanes; every lane gets them.
template <class Real>
__device__ __forceinline__ void set_factors(const RecurrentParams& p, const Products<Real>& sums,
                                            Real& rq, Real& rk, Real& qk) {
  rq = static_cast<Real>(p.scale);
  rk = 1;
  if (p.qk_l2norm) {
    rq /= sqrt(lane_sum(sums.qq) + Real(1e-6));
    rk /= sqrt(lane_sum(sums.kk) + Real(1e-6));
  }
  qk = rq * rk * lane_sum(sums.qk);
}

/// Whether states of a type take exp(g) as the sum of two numbers. One alone errs by the same in
/// every token of an equal gate, up to 2^-25 of the state: 5e-4 after 16384 tokens. A 16-bit state
/// loses more in each call.
template <class State>
inline constexpr bool kTwoFactors = sizeof(State) > 2;

/// The decay factor of a channel: exp(g).
template <class Real>
struct Decay {
  Real factor;
  Real rest = 0;  ///< with kTwoFactors
};

/// fp64 does not clamp: exp(-inf) = 0. Below exp(-0.5) few tokens share a state, and one number is
/// enough.
template <class State, class Real>
__device__ __forceinline__ Decay<Real> decay_of(const GateParams& params, const Gate<Real>& gate,
                                                Real raw) {
  const Real value = gate_value(params, gate, raw);
  const Real g = sizeof(Real) == 4 ? clamp_gate(value) : value;
  if (!kTwoFactors<State> || !(g > Real(-0.5))) return {exp(g)};
  const Real less = expm1(g);
  const Real factor = 1 + less;
  return {factor, less - (factor - 1)};
}

template <class Real>
__device__ __forceinline__ Real beta_of(const RecurrentParams& p, Real x) {
  return p.beta_sigmoid ? static_cast<Real>(p.beta_factor) * sigmoid(x) : x;
}

// One token on one element, one column. Which products are fused into additions is written out, so
// that recurrent_step and sm90_recurrent give the same bits; recurrent_any does not use these.

/// (2.1), and the element's share of St^T k.
template <class State, class Real>
__device__ __forceinline__ void decay_element(Real& s, const Decay<Real>& decay, Real k,
                                              Real& error) {
  s = kTwoFactors<State> ? fma(s, decay.factor, s * decay.rest) : s * decay.factor;
  error = fma(s, k, error);
}

/// (2.2), (2.3): u of a column, k as given (not yet times rk).
template <class Real>
__device__ __forceinline__ Real write_of(Real beta, Real rk, Real error, Real v) {
  return beta * fma(-rk, error, v);
}

/// (2.5) from St: S^T q = St^T q + <q, k> u.
template <class Real>
__device__ __forceinline__ Real output_of(Real rq, Real qk, Real out, Real u) {
  return fma(rq, out, qk * u);
}

/// What a thread asks for before it waits for anything: the parameters of its channel's gate, and
/// its first value of v and of beta. One wait for memory instead of three (H200: 20 % of a step).
template <class Real>
struct Asked {
  RawElement<Real> A_log, dt_bias, v, beta;
};

template <class Real, int K, int COLUMNS>
__device__ __forceinline__ Asked<Real> ask(const RecurrentParams& p, const RecurrentTile& tile,
                                           int64_t token, int count) {
  const int tid = static_cast<int>(threadIdx.x);
  const int c = tid % K;
  Asked<Real> asked{};
  const Tensor& A_log = p.gate.A_log;
  const Tensor& dt_bias = p.gate.dt_bias;
  if (A_log.data) asked.A_log = load_raw<Real>(A_log, tile.hv * A_log.stride[0]);
  if (dt_bias.data && c < p.heads.K) {
    asked.dt_bias = load_raw<Real>(dt_bias, tile.hv * dt_bias.stride[0] + c * dt_bias.stride[1]);
  }
  const int64_t v = tile.v0 + tid % COLUMNS;
  if (tid < count * COLUMNS && v < p.heads.V) {
    asked.v =
        load_raw<Real>(p.v, token_offset(p.v, tile.tokens.batch, token + tid / COLUMNS, tile.hv) +
                                v * p.v.stride[3]);
  }
  if (tid < count) {
    asked.beta =
        load_raw<Real>(p.beta, token_offset(p.beta, tile.tokens.batch, token + tid, tile.hv));
  }
  return asked;
}

/// The channel tid % K of q, k and the decay of every token. kTokenBatch tokens are asked for
/// before the first is converted.
template <class State, class Real, int K, int COLUMNS>
__device__ __forceinline__ void load_keys(Token<Real, K, COLUMNS>* tokens, const RecurrentParams& p,
                                          const RecurrentTile& tile, int64_t token, int count,
                                          const Asked<Real>& asked) {
  const int c = static_cast<int>(threadIdx.x) % K;
  const int step = static_cast<int>(blockDim.x) / K;
  const int64_t h = divide(tile.hv, p.heads.group).quotient;
  const int64_t batch = tile.tokens.batch;
  const int64_t q_base = token_offset(p.q, batch, token, h) + c * p.q.stride[3];
  const int64_t k_base = token_offset(p.k, batch, token, h) + c * p.k.stride[3];
  const Tensor& g = p.gate.g;
  const int64_t g_base = token_offset(g, batch, token, tile.hv) + c * g.stride[3];
  const bool inside = c < p.heads.K;
  for (int first = static_cast<int>(threadIdx.x) / K; first < count; first += kTokenBatch * step) {
    RawElement<Real> q[kTokenBatch], k[kTokenBatch], raw[kTokenBatch];
#pragma unroll
    for (int j = 0; j < kTokenBatch; ++j) {
      const int slot = first + j * step;
      if (!inside || slot >= count) continue;
      q[j] = load_raw<Real>(p.q, q_base + slot * p.q.stride[1]);
      k[j] = load_raw<Real>(p.k, k_base + slot * p.k.stride[1]);
      raw[j] = load_raw<Real>(g, g_base + slot * g.stride[1]);
    }
    Gate<Real> gate;
    if (p.gate.A_log.data) {
      gate.slope = gate_slope(p.gate, convert<Real>(asked.A_log, p.gate.A_log.dtype));
    }
    if (p.gate.dt_bias.data) gate.bias = convert<Real>(asked.dt_bias, p.gate.dt_bias.dtype);
#pragma unroll
    for (int j = 0; j < kTokenBatch; ++j) {
      const int slot = first + j * step;
      if (slot >= count) continue;
      const Decay<Real> decay =
          inside ? decay_of<State>(p.gate, gate, convert<Real>(raw[j], g.dtype)) : Decay<Real>{1};
      tokens[slot].q[c] = inside ? convert<Real>(q[j], p.q.dtype) : Real(0);
      tokens[slot].k[c] = inside ? convert<Real>(k[j], p.k.dtype) : Real(0);
      tokens[slot].decay[c] = decay.factor;
      if (kTwoFactors<State>) tokens[slot].rest[c] = decay.rest;
    }
  }
}

template <class Real, int K, int COLUMNS>
__device__ __forceinline__ void load_values(Token<Real, K, COLUMNS>* tokens,
                                            const RecurrentParams& p, const RecurrentTile& tile,
                                            int64_t token, int count, const Asked<Real>& asked) {
  const int tid = static_cast<int>(threadIdx.x);
  const int64_t batch = tile.tokens.batch;
  RawElement<Real> raw = asked.v;
  for (int e = tid; e < count * COLUMNS; e += static_cast<int>(blockDim.x)) {
    const int slot = e / COLUMNS;
    const int64_t v = tile.v0 + e % COLUMNS;
    const bool inside = v < p.heads.V;
    if (inside && e != tid) {
      raw =
          load_raw<Real>(p.v, token_offset(p.v, batch, token + slot, tile.hv) + v * p.v.stride[3]);
    }
    tokens[slot].v[e % COLUMNS] = inside ? convert<Real>(raw, p.v.dtype) : Real(0);
  }
  if (tid >= count) return;
  tokens[tid].beta = beta_of(p, convert<Real>(asked.beta, p.beta.dtype));
}

/// One warp a token.
template <class Real, int K, int COLUMNS>
__device__ __forceinline__ void find_norms(Token<Real, K, COLUMNS>* tokens,
                                           const RecurrentParams& p, int count) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int slot = static_cast<int>(threadIdx.x) / 32; slot < count;
       slot += static_cast<int>(blockDim.x) / 32) {
    Products<Real> sums;
#pragma unroll
    for (int c = lane; c < K; c += 32) sums.add(tokens[slot].q[c], tokens[slot].k[c]);
    Real rq, rk, qk;
    set_factors(p, sums, rq, rk, qk);
    if (lane != 0) continue;
    tokens[slot].rq = rq;
    tokens[slot].rk = rk;
    tokens[slot].qk = qk;
  }
}

/// Tokens first.. of a tile, `count` of them, ready for use on a State. Starts with nothing in use
/// and ends with a barrier.
template <class State, class Real, int K, int COLUMNS>
__device__ __forceinline__ void load_block(Token<Real, K, COLUMNS>* tokens,
                                           const RecurrentParams& p, const RecurrentTile& tile,
                                           int64_t first, int count) {
  const int64_t token = tile.tokens.begin + first;
  const Asked<Real> asked = ask<Real, K, COLUMNS>(p, tile, token, count);
  load_keys<State>(tokens, p, tile, token, count, asked);
  load_values(tokens, p, tile, token, count, asked);
  __syncthreads();
  find_norms(tokens, p, count);
  __syncthreads();
}

}  // namespace kda::cuda
