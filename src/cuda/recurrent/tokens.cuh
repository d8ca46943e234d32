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
  int64_t hv;
  int64_t v0;
  int64_t slot;
};

__device__ __forceinline__ int64_t recurrent_tiles(const RecurrentParams& p, int columns) {
  const int64_t v_tiles = (p.heads.V + columns - 1) / columns;
  return (p.sequences.count + (p.sequences.cu.data ? 1 : 0)) * p.heads.HV * v_tiles;
}

__device__ __forceinline__ RecurrentTile recurrent_tile(const RecurrentParams& p, int64_t index,
                                                        int columns) {
  const int64_t v_tiles = (p.heads.V + columns - 1) / columns;
  RecurrentTile tile;
  tile.v0 = index % v_tiles * columns;
  tile.hv = index / v_tiles % p.heads.HV;
  const int64_t sequence = index / v_tiles / p.heads.HV;
  if (sequence == p.sequences.count) {
    tile.tokens = {0, used_tokens(p.sequences), p.sequences.T, 0, 0};
    tile.slot = -1;
    return tile;
  }
  tile.tokens = tokens_of(p.sequences, sequence);
  tile.slot = p.indices.data ? load_index(p.indices, sequence) : sequence;
  if (tile.slot >= p.states) tile.slot = -1;
  return tile;
}

/// Zeros in o for all tokens of a tile.
template <class Real>
__device__ void write_zeros(const RecurrentParams& p, const RecurrentTile& tile, int columns) {
  const int64_t count = (tile.tokens.end - tile.tokens.begin) * columns;
  for (int64_t e = threadIdx.x; e < count; e += blockDim.x) {
    const int64_t v = tile.v0 + e % columns;
    if (v >= p.heads.V) continue;
    store<Real>(p.o,
                token_offset(p.o, tile.tokens.batch, tile.tokens.begin + e / columns, tile.hv) +
                    v * p.o.stride[3],
                Real(0));
  }
}

/// Inputs of up to kTokenBlock tokens, activated. q carries the scale.
template <class Real, int K, int COLUMNS>
struct TokenBlock {
  alignas(16) Real q[kTokenBlock][K];
  alignas(16) Real k[kTokenBlock][K];
  alignas(16) Real decay[kTokenBlock][K];
  alignas(16) Real v[kTokenBlock][COLUMNS];
  Real beta[kTokenBlock];
  Real qk[kTokenBlock];  ///< <q, k>, scaled
};

template <class Real>
__device__ __forceinline__ Real lane_sum(Real x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

/// One warp loads one token. fp64 does not clamp the decay: exp(-inf) = 0.
template <class Real, int K, int COLUMNS>
__device__ void load_token(TokenBlock<Real, K, COLUMNS>& block, const RecurrentParams& p,
                           const RecurrentTile& tile, int64_t first, int slot) {
  constexpr int kOwn = (K + 31) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t token = tile.tokens.begin + first + slot;
  const int64_t batch = tile.tokens.batch;
  const int64_t h = tile.hv / (p.heads.HV / p.heads.H);
  const int64_t q_base = token_offset(p.q, batch, token, h);
  const int64_t k_base = token_offset(p.k, batch, token, h);
  const int64_t g_base = token_offset(p.gate.g, batch, token, tile.hv);
  Real q[kOwn], k[kOwn], g[kOwn];
  const auto fetch = [&](Real(&x)[kOwn], const Tensor& t, int64_t base) {
    with_element(t.dtype, [&]<class T>(Element<T>) {
      const T* data = static_cast<const T*>(t.data) + base;
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        const int c = lane + 32 * j;
        x[j] = c < p.heads.K ? to_real<Real>(data[c * t.stride[3]]) : Real(0);
      }
    });
  };
  fetch(q, p.q, q_base);
  fetch(k, p.k, k_base);
  fetch(g, p.gate.g, g_base);
  const Real logit = load<Real>(
      p.beta, batch * p.beta.stride[0] + token * p.beta.stride[1] + tile.hv * p.beta.stride[2]);
#pragma unroll
  for (int j = 0; j < (COLUMNS + 31) / 32; ++j) {
    const int c = lane + 32 * j;
    if (c >= COLUMNS) continue;
    block.v[slot][c] = tile.v0 + c < p.heads.V
                           ? load<Real>(p.v, token_offset(p.v, batch, token, tile.hv) +
                                                 (tile.v0 + c) * p.v.stride[3])
                           : Real(0);
  }
  Real q_square = 0, k_square = 0, qk = 0;
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    q_square += q[j] * q[j];
    k_square += k[j] * k[j];
    qk += q[j] * k[j];
  }
  Real rq = static_cast<Real>(p.scale);
  Real rk = 1;
  if (p.qk_l2norm) {
    rq /= sqrt(lane_sum(q_square) + Real(1e-6));
    rk /= sqrt(lane_sum(k_square) + Real(1e-6));
  }
  qk = lane_sum(qk);
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    const int c = lane + 32 * j;
    if (c >= K) continue;
    Real decay = 1;
    if (c < p.heads.K) {
      const Real value = gate_value(p.gate, gate_of<Real>(p.gate, tile.hv, c), g[j]);
      decay = exp(sizeof(Real) == 4 ? clamp_gate(value) : value);
    }
    block.q[slot][c] = rq * q[j];
    block.k[slot][c] = rk * k[j];
    block.decay[slot][c] = decay;
  }
  if (lane == 0) {
    block.qk[slot] = rq * rk * qk;
    block.beta[slot] = p.beta_sigmoid ? static_cast<Real>(p.beta_factor) * sigmoid(logit) : logit;
  }
}

/// Tokens first.. of a tile, at most kTokenBlock of them.
template <class Real, int K, int COLUMNS>
__device__ void load_tokens(TokenBlock<Real, K, COLUMNS>& block, const RecurrentParams& p,
                            const RecurrentTile& tile, int64_t first, int count) {
  for (int slot = static_cast<int>(threadIdx.x) / 32; slot < count;
       slot += static_cast<int>(blockDim.x) / 32) {
    load_token(block, p, tile, first, slot);
  }
}

}  // namespace kda::cuda
