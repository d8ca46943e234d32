// The intra part of grad: gradients of the scores times gated q and k, 16 x 16 blocks with the
// references of scores.cuh. Rows take 2^(G_i - first of their block), whatever the column; columns
// take 2^(first - G_j) in the diagonal blocks and 2^(G_16 - G_j) where block 1 reads block 0.
// Every operand is a sum of two bf16 numbers; the product of both rests is left out.
//
// Channels whose factor in a diagonal block is beyond 2^kFarRow leave that block's product and are
// added pair by pair.
#pragma once

#include "cuda/sm90/chunk_bwd/grad_load.cuh"

namespace kda::cuda::sm90 {

/// Of a channel: G of the first rows of both blocks, whether a block is far.
struct ChannelGate {
  float first[2];
  float end;
  bool far[2];
};

template <class Io, int K>
__device__ __forceinline__ ChannelGate channel_gate(const GradShared<Io, K>& shared, int k) {
  ChannelGate gate;
  gate.first[0] = shared.G[0][k];
  gate.first[1] = shared.G[kBlock][k];
  gate.end = shared.G[kChunk - 1][k];
  gate.far[0] = gate.first[0] - shared.G[kBlock - 1][k] > kFarRow;
  gate.far[1] = gate.first[1] - gate.end > kFarRow;
  return gate;
}

/// Sixteen tokens' elements of a tile [tokens][channels] at this thread's places in accumulators
/// [channels x tokens]: register 2 c + i holds channel(c), token(i, 0) and token(i, 1). `address`:
/// of this lane's row.
template <class T>
struct TokenFragment {
  uint32_t pairs[4];
  __device__ __forceinline__ explicit TokenFragment(uint32_t address) {
    ldmatrix_transposed(pairs, address);
  }
  __device__ __forceinline__ float operator()(int i, int c, int e) const {
    const float2 pair = unpack<T>(pairs[2 * c + i % 2]);
    return e == 0 ? pair.x : pair.y;
  }
};

/// The lane's row and unit of a panel [tokens][64 channels], of its first 16 tokens.
__device__ __forceinline__ uint32_t fragment_row(const unsigned char* panel, int warp, int lane) {
  return shared_address(panel) + unit_offset(lane % 16, 2 * (warp % 4) + lane / 16);
}

/// x as it is after rounding to T.
template <class T>
__device__ __forceinline__ float round_to(float x) {
  return unpack<T>(pack<T>(x, 0)).x;
}

/// What rounding to bf16 leaves.
__device__ __forceinline__ float2 rest_of(float2 x) {
  return x - unpack<Bf16>(pack<Bf16>(x.x, x.y));
}

/// Four columns of a row.
struct Quad {
  float2 left, right;
};
__device__ __forceinline__ Quad operator*(Quad x, Quad y) {
  return {x.left * y.left, x.right * y.right};
}
__device__ __forceinline__ Quad operator*(Quad x, float y) { return {x.left * y, x.right * y}; }
__device__ __forceinline__ Quad operator-(Quad x, Quad y) {
  return {x.left - y.left, x.right - y.right};
}
__device__ __forceinline__ Quad exp2_quad(Quad x) {
  return {exp2_pair(x.left), exp2_pair(x.right)};
}

/// A thread's four columns of its warpgroup's 64 channels and four tokens.
template <class Io, int K>
struct KeyWriter {
  static constexpr int kTokens = 4;

  GradShared<Io, K>& shared;
  int group;
  int column;  ///< of the 64
  int first_row;
  int block;

  __device__ explicit KeyWriter(GradShared<Io, K>& memory) : shared(memory) {
    const int tid = thread_index();
    group = tid / 128;
    column = tid % 16 * 4;
    first_row = tid % 128 / 16 * kTokens;
    block = first_row / kBlock;
  }

  __device__ __forceinline__ KeyTiles& tiles() const { return shared.intra.keys[group]; }
  __device__ __forceinline__ Quad G(int row) const {
    const float4 x = *reinterpret_cast<const float4*>(&shared.G[row][64 * group + column]);
    return {{x.x, x.y}, {x.z, x.w}};
  }
  __device__ __forceinline__ Quad quad_of(const Io* row) const {
    const uint2 x = *reinterpret_cast<const uint2*>(row + 64 * group + column);
    return {unpack<Io>(x.x), unpack<Io>(x.y)};
  }
  /// Both terms of row t of this thread, from row `from` of a tile on.
  template <int BYTES>
  __device__ __forceinline__ void put(unsigned char (&tile)[2][BYTES], int from, int t,
                                      Quad x) const {
    // The first of this thread's rows is the first or fifth of its eight: the others' units are
    // permuted further.
    const uint32_t place = unit_offset(first_row, column / 8) + column % 8 * 2;
    unsigned char* const to = tile[0] + (from + t) * kPanelRowBytes + (place ^ (t << 4));
    *reinterpret_cast<uint2*>(to) =
        uint2{pack<Bf16>(x.left.x, x.left.y), pack<Bf16>(x.right.x, x.right.y)};
    const Quad rest{rest_of(x.left), rest_of(x.right)};
    *reinterpret_cast<uint2*>(to + BYTES) =
        uint2{pack<Bf16>(rest.left.x, rest.left.y), pack<Bf16>(rest.right.x, rest.right.y)};
  }

  /// Zeros where the block is far.
  __device__ __forceinline__ void put_columns() const {
    constexpr float kNothing = -1e30f;  // 2^ it is 0
    const Quad next = G(kBlock);
    Quad first = G(block * kBlock);
    const Quad range = first - G(block * kBlock + kBlock - 1);
    if (range.left.x > kFarRow) first.left.x = kNothing;
    if (range.left.y > kFarRow) first.left.y = kNothing;
    if (range.right.x > kFarRow) first.right.x = kNothing;
    if (range.right.y > kFarRow) first.right.y = kNothing;
    Quad keys[kTokens];  // no read moves across a write to shared memory
    Quad decays[kTokens];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const int row = first_row + t;
      keys[t] = quad_of(shared.k[row]) * shared.norm[1][row];
      decays[t] = G(row);
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      put(tiles().columns, block * kBlock, t, keys[t] * exp2_quad(first - decays[t]));
      if (block == 0) put(tiles().columns, kBlock, t, keys[t] * exp2_quad(next - decays[t]));
    }
  }

  /// The rows' operands of the thread's tokens: [q, beta k][larger, rest][token].
  __device__ __forceinline__ void make_rows(uint2 (&x)[2][2][kTokens]) const {
    const Quad first = G(block * kBlock);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const int row = first_row + t;
      const Quad up = exp2_quad(G(row) - first);
      const Quad q = quad_of(shared.q[row]) * (up * shared.norm[0][row]);
      const Quad k = quad_of(shared.k[row]) * (up * (shared.norm[1][row] * shared.beta[row]));
      x[0][0][t] = packed(q);
      x[0][1][t] = packed({rest_of(q.left), rest_of(q.right)});
      x[1][0][t] = packed(k);
      x[1][1][t] = packed({rest_of(k.left), rest_of(k.right)});
    }
  }
  __device__ __forceinline__ void put_rows(const uint2 (&x)[2][2][kTokens]) const {
    const uint32_t place = unit_offset(first_row, column / 8) + column % 8 * 2;
#pragma unroll
    for (int which = 0; which < 2; ++which) {
#pragma unroll
      for (int term = 0; term < 2; ++term) {
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          *reinterpret_cast<uint2*>(tiles().rows[term] + (which * kChunk + t) * kPanelRowBytes +
                                    (place ^ (t << 4))) = x[which][term][t];
        }
      }
    }
  }
  static __device__ __forceinline__ uint2 packed(Quad x) {
    return {pack<Bf16>(x.left.x, x.left.y), pack<Bf16>(x.right.x, x.right.y)};
  }
};

/// Two neighbours of a score gradient, both terms.
__device__ __forceinline__ void put_terms(unsigned char* panel, int row, int column, float2 x) {
  const auto put = [&](int unit, float2 term) {
    *reinterpret_cast<uint32_t*>(panel + unit_offset(row, unit) + column % 8 * 2) =
        pack<Bf16>(term.x, term.y);
  };
  put(column / 8, x);
  put((kChunk + column) / 8, rest_of(x));
}

/// dP (5.2) and dL (5.28) from the products [do; R~] v_new^T; the diagonal apart; `unit` is that of
/// R. By one warpgroup, of which `warp` is one. Rows of block 0 have columns of block 0 alone.
template <class Io, int K>
__device__ __forceinline__ void put_scores_gradient(GradShared<Io, K>& shared, const float* x,
                                                    float scale, float unit, int warp, int lane) {
  const bool second = warp % 2 == 1;
  const float factor = warp < 2 ? scale : -unit;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = 16 * warp + lane / 4 + 8 * half;
    const int i = row % kChunk;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int j = 8 * n + lane % 4 * 2;
      const int r = 4 * n + 2 * half;
      const float left = factor * x[r];
      const float right = factor * x[r + 1];
      if (warp < 2 && j == i) shared.diagonal[i] = left;
      if (warp < 2 && j + 1 == i) shared.diagonal[i] = right;
      if (second || n < 2) {
        put_terms(shared.scores, row, j, {j < i ? left : 0, j + 1 < i ? right : 0});
      }
    }
  }
}

/// The same over the tokens of the chunk before: nothing is masked.
template <class Io, int K>
__device__ __forceinline__ void put_cross_gradient(GradShared<Io, K>& shared, const float* x,
                                                   float scale, float unit, int warp, int lane) {
  const float factor = warp < 2 ? scale : -unit;
#pragma unroll
  for (int r = 0; r < 16; r += 2) {
    const int row = 16 * warp + lane / 4 + 8 * (r / 2 % 2);
    put_terms(shared.intra.cross, row, r / 4 * 8 + lane % 4 * 2,
              {factor * x[r], factor * x[r + 1]});
  }
}

/// Both terms.
template <class Io, int K>
__device__ __forceinline__ float score_gradient(const GradShared<Io, K>& shared, int row, int j) {
  const auto term = [&](int column) {
    return __bfloat162float(*reinterpret_cast<const Bf16*>(
        shared.scores + unit_offset(row, column / 8) + column % 8 * 2));
  };
  return term(j) + term(kChunk + j);
}

/// What token t of channel k takes from its far diagonal block: added to (dq2, z, dkc).
template <class Io, int K>
__device__ __forceinline__ float3 far_sums(const GradShared<Io, K>& shared, int t, int k) {
  float3 sum{0, 0, 0};
  const int first = t / kBlock * kBlock;
#pragma unroll 1
  for (int j = first; j < t; ++j) {
    const float y = to_real<float>(shared.k[j][k]) * shared.norm[1][j] *
                    exp2_of(shared.G[t][k] - shared.G[j][k]);
    sum.x = fmaf(score_gradient(shared, t, j), y, sum.x);
    sum.y = fmaf(score_gradient(shared, kChunk + t, j), y, sum.y);
  }
#pragma unroll 1
  for (int i = t + 1; i < first + kBlock; ++i) {
    const float decay = exp2_of(shared.G[i][k] - shared.G[t][k]);
    const float q = to_real<float>(shared.q[i][k]) * shared.norm[0][i];
    const float kb = to_real<float>(shared.k[i][k]) * shared.norm[1][i] * shared.beta[i];
    sum.z = fmaf(decay, score_gradient(shared, i, t) * q, sum.z);
    sum.z = fmaf(decay, score_gradient(shared, kChunk + i, t) * kb, sum.z);
  }
  return sum;
}

}  // namespace kda::cuda::sm90
