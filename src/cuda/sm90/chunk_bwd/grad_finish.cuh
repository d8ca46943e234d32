// The last part of grad: (5.32), (5.33), the backward of l2norm, gates and beta, and the stores.
#pragma once

#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/sm90/chunk_bwd/grad_cross.cuh"
#include "cuda/sm90/chunk_bwd/grad_gates.cuh"

namespace kda::cuda::sm90 {

/// A token's gradients in the order of GradShared::sums.
enum GradSum : int { kKeySum, kQueryNorm, kKeyNorm };

template <class Io, int K>
struct GradFinish {
  using Traits = GradTraits<Io, K>;

  GradShared<Io, K>& shared;
  const GradParams& p;
  const GradWork& work;
  int warp;
  int lane;
  GradLane at;
  GradCross<Io, K> cross;

  __device__ GradFinish(GradShared<Io, K>& memory, const GradParams& params, const GradWork& what,
                        int warp_of, int lane_of)
      : shared(memory),
        p(params),
        work(what),
        warp(warp_of),
        lane(lane_of),
        at(warp_of, lane_of),
        cross{memory, params, what, warp_of, lane_of} {}

  __device__ __forceinline__ ChannelGate gate_of(int c) const {
    return channel_gate(shared, at.channel(c));
  }
  __device__ __forceinline__ float q(int i, int c, int e) const {
    const int t = at.token(i, e);
    return to_real<float>(shared.q[t][at.channel(c)]) * shared.norm[0][t];
  }
  __device__ __forceinline__ float k(int i, int c, int e) const {
    const int t = at.token(i, e);
    return to_real<float>(shared.k[t][at.channel(c)]) * shared.norm[1][t];
  }
  /// S = [dqe | Y] -> [dq1 | 2^G Y] but the rows' factor: 2^G = 2^first 2^(G - first). Where the
  /// chunk before takes part, the scale is in S already.
  __device__ __forceinline__ void scale_rows(float (&S)[32]) const {
    const float scale = work.crosses ? 1 : p.scale;
    const float mantissa = work.crosses ? 1 : -unit_of(shared, p);
    const ChannelGate gate[2] = {gate_of(0), gate_of(1)};
    float entering[2][2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int block = 0; block < 2; ++block) entering[c][block] = exp2_of(gate[c].first[block]);
    }
    GradLane::each([&](int r, int i, int c, int) {
      S[r] *= scale * entering[c][i / 2];
      S[16 + r] *= mantissa * entering[c][i / 2];
    });
  }

  using Fragment = TokenFragment<Io>;
  /// The lane's row and unit of a tile of q or k, of block 0.
  __device__ __forceinline__ uint32_t tile_row(const Io (&tile)[kChunk][Traits::kStride]) const {
    return shared_address(&tile[lane % 16][16 * warp + lane / 16 * 8]);
  }
  /// (5.32) of a block of 16 tokens: S -> [dq | dk], dkx -> k . dkx, W, and each token's sums over
  /// the warp's channels. x is dkc before the columns' factors, arranged.
  ///
  /// A pair of tokens enters W of both with opposite signs, and dg of the tokens before takes the
  /// sum. There the rounding of its operands has to cancel too: of two terms they are as good as
  /// exact, and kg of the chunk before is rounded alike in both.
  template <int BLOCK>
  __device__ __forceinline__ void combine_block(float (&S)[32], float (&dkx)[32],
                                                const float (&x)[24], float (&dkg)[8],
                                                float (&W)[16]) const {
    const ChannelGate gate[2] = {gate_of(0), gate_of(1)};
    float sums[3][4] = {};
    const auto each = [](auto f) { GradLane::each<2 * BLOCK, 2 * BLOCK + 2>(f); };
    constexpr uint32_t kTileBytes = BLOCK * kBlock * Traits::kStride * sizeof(Io);
    const Fragment q(tile_row(shared.q) + kTileBytes);
    const Fragment k(tile_row(shared.k) + kTileBytes);
    each([&](int r, int, int, int) { W[r] = 0; });
    if (work.carries) {
      each([&](int r, int i, int c, int e) {
        const int t = at.token(i, e);
        const float factor = exp2_of(gate[c].end - shared.G[t][at.channel(c)]);
        const float kg = round_to<Io>(factor * k(i, c, e) * shared.norm[1][t]);
        W[r] = fmaf(-kg, dkg[r % 8], W[r]);
        dkg[r % 8] *= factor;
      });
    }
    each([&](int r, int i, int c, int e) {
      const int t = at.token(i, e);
      const float g = shared.G[t][at.channel(c)];
      const float down = gate[c].far[BLOCK] ? 0 : exp2_of(gate[c].first[BLOCK] - g);
      float dkc = fmaf(down, x[r + 8 * BLOCK], dkg[r % 8]);
      if (BLOCK == 0) dkc = fmaf(exp2_of(gate[c].first[1] - g), x[8 + r], dkc);
      const float up = exp2_of(g - gate[c].first[BLOCK]);
      const float y = q(i, c, e) * shared.norm[0][t];
      const float z = k(i, c, e) * shared.norm[1][t];
      const float d = shared.diagonal[t];
      const float kr = up * S[16 + r];
      const float last = unit_of(shared, p) * exp2_of(gate[c].end - g) * dkx[r];
      W[r] += fmaf(y * up, S[r], z * fmaf(shared.beta[t], kr, dkg[r % 8] - dkc));
      S[r] = fmaf(d, z, up * S[r]);
      S[16 + r] = fmaf(shared.beta[t], kr, last) + fmaf(d, y, dkc);
      dkx[r] = last * z;
      const int own = 2 * (i % 2) + e;
      sums[kKeySum][own] += kr * z;
      sums[kQueryNorm][own] += S[r] * y;
      sums[kKeyNorm][own] += S[16 + r] * z;
    });
    if (gate[0].far[BLOCK] || gate[1].far[BLOCK]) add_far<BLOCK>(S, W, sums);
    put_sums<BLOCK>(kKeySum, sums[kKeySum]);
    if (!p.undo_l2norm) return;
    put_sums<BLOCK>(kQueryNorm, sums[kQueryNorm]);
    put_sums<BLOCK>(kKeyNorm, sums[kKeyNorm]);
  }

  /// One element at a time: unrolled, the rare path would take the common one's registers.
  template <int BLOCK>
  __device__ __forceinline__ void add_far(float (&S)[32], float (&W)[16],
                                          float (&sums)[3][4]) const {
#pragma unroll 1
    for (int r = 8 * BLOCK; r < 8 * BLOCK + 8; ++r) {
      const int c = r / 2 % 2;
      const ChannelGate gate = gate_of(c);
      if (!gate.far[BLOCK]) continue;
      const int t = at.token(r / 4, r % 2);
      const float3 sum = far_sums(shared, t, at.channel(c));
      const float y = q(r / 4, c, r % 2);
      const float z = k(r / 4, c, r % 2);
      const float row = shared.beta[t] * sum.y;
#pragma unroll
      for (int i = 8 * BLOCK; i < 8 * BLOCK + 8; ++i) {
        S[i] += i == r ? sum.x : 0;
        S[16 + i] += i == r ? row + sum.z : 0;
        W[i] += i == r ? fmaf(y, sum.x, z * (row - sum.z)) : 0;
      }
#pragma unroll
      for (int token = 0; token < 4; ++token) {
        const bool own = token == r / 4 % 2 * 2 + r % 2;
        sums[kKeySum][token] += own ? sum.y * z : 0;
        sums[kQueryNorm][token] += own ? sum.x * y : 0;
        sums[kKeyNorm][token] += own ? (row + sum.z) * z : 0;
      }
    }
  }

  /// Sums over the channels of a warp of x[token of the block], to `partial`. Each step halves the
  /// tokens that a lane has.
  template <int BLOCK>
  __device__ __forceinline__ void put_sums(int which, float (&x)[4]) const {
#pragma unroll
    for (int half = 2; half > 0; half /= 2) {
      const bool upper = (lane & (8 * half)) != 0;
#pragma unroll
      for (int t = 0; t < half; ++t) {
        const float other = __shfl_xor_sync(~0u, upper ? x[t] : x[t + half], 8 * half);
        x[t] = (upper ? x[t + half] : x[t]) + other;
      }
    }
    const float sum = x[0] + __shfl_xor_sync(~0u, x[0], 4);
    const int t = lane / 8;
    if (lane % 8 < 4) shared.partial[which][warp][at.token(2 * BLOCK + t / 2, t % 2)] = sum;
  }

  /// The warps' sums of a token.
  __device__ __forceinline__ float sum_of(GradSum which, int t) const {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < Traits::kWarps; ++w) sum += shared.partial[which][w][t];
    return sum;
  }

  /// (3.13), a few tokens a warp, so that none is late.
  __device__ __forceinline__ void store_dbeta() const {
    constexpr int kShare = kChunk / Traits::kWarps;
    const int t = warp * kShare + lane;
    if (lane >= kShare || t >= work.chunk.rows || p.dbeta.data == nullptr) return;
    store<float>(p.dbeta,
                 token_offset(p.dbeta, work.chunk.batch, work.chunk.begin + t, work.pair.hv),
                 shared.beta_slope[t] *
                     fmaf(unit_of(shared, p), shared.value_product[t], sum_of(kKeySum, t)));
  }

  /// (3.3). Each warp adds up what it needs, a token a lane, rather than wait for others.
  __device__ __forceinline__ void undo_norms(float (&S)[32]) const {
    const float queries = sum_of(kQueryNorm, lane);
    const float keys = sum_of(kKeyNorm, lane);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const uint32_t bytes = static_cast<uint32_t>(block * kBlock * Traits::kStride * 2);
      const Fragment q(tile_row(shared.q) + bytes);
      const Fragment k(tile_row(shared.k) + bytes);
#pragma unroll
      for (int r = 8 * block; r < 8 * block + 8; ++r) {
        const int i = r / 4;
        const int c = r / 2 % 2;
        const int e = r % 2;
        const int t = at.token(i, e);
        const float y = q(i, c, e) * shared.norm[0][t];
        const float z = k(i, c, e) * shared.norm[1][t];
        S[r] = shared.norm[0][t] * fmaf(-y, __shfl_sync(~0u, queries, t), S[r]);
        S[16 + r] = shared.norm[1][t] * fmaf(-z, __shfl_sync(~0u, keys, t), S[16 + r]);
      }
    }
  }

  /// (5.33): dg of token t is that of the first token and k . dkx - W of all tokens before t. Over
  /// G of this warp's channels: the steps k . dkx - W; their sums by segments of 8 tokens.
  __device__ __forceinline__ void sum_tokens(const float (&W)[16], const float (&X)[32]) const {
    const float end[2] = {shared.G[kChunk - 1][at.channel(0)], shared.G[kChunk - 1][at.channel(1)]};
    __syncwarp();
    const bool upper = (lane & 2) != 0;
    const bool odd = (lane & 1) != 0;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int channel = at.channel(c);
      float all = 0;
      float steps[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = 4 * i + 2 * c;
        const float2 step{X[r] - W[r], X[r + 1] - W[r + 1]};
        shared.G[at.token(i, 0)][channel] = step.x;
        shared.G[at.token(i, 1)][channel] = step.y;
        steps[i] = step.x + step.y;
        all += W[r] + W[r + 1];
      }
      // Four sums over the quad's four lanes: each lane ends with one.
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float other = __shfl_xor_sync(~0u, upper ? steps[i] : steps[i + 2], 2);
        steps[i] = (upper ? steps[i + 2] : steps[i]) + other;
      }
      const float other = __shfl_xor_sync(~0u, odd ? steps[0] : steps[1], 1);
      shared.dg_steps[lane % 4][channel] = (odd ? steps[1] : steps[0]) + other;
      for (int step = 1; step < 4; step *= 2) all += __shfl_xor_sync(~0u, all, step);
      if (lane % 4 == 0) put_first(channel, end[c], all);
    }
  }

  /// dg of a chunk's first token, from the sum of W over its tokens. What follows the earlier chunk
  /// of a pair, and the states, come from the later one; to this the earlier one's k . dkx are as
  /// if they were tokens before.
  __device__ __forceinline__ void put_first(int channel, float end, float all) const {
    if (work.carries) {
      shared.dg_first[channel] = all + shared.carry[channel];
      return;
    }
    float decay = unit_of(shared, p) * exp2_of(end);
    if (!work.crosses) {
      shared.dg_first[channel] = fmaf(decay, shared.state_product[channel], all);
      return;
    }
    decay *= shared.decay_before[channel];
    const float first = fmaf(decay, shared.state_product[channel], all);
    shared.dg_first[channel] = first + shared.update_product[channel];
    shared.carry[channel] = first;
  }

  /// Rows of fp32: eight lanes fill a sector.
  __device__ __forceinline__ void store_fp32(GradRows which, const Tensor& t,
                                             const float* x) const {
    float* const to = work.at<float>(which);
    GradLane::each([&](int r, int i, int c, int e) {
      const int token = at.token(i, e);
      if (token < work.chunk.rows) to[token * t.stride[1] + at.channel(c)] = x[r];
    });
  }

  /// Over the warp's channels of q or k, which no other warp reads.
  __device__ __forceinline__ void stage(Io (&tile)[kChunk][Traits::kStride], const float* x) const {
    const int row = lane % 8 + lane / 16 * 8;
    const uint32_t place = shared_address(&tile[row][16 * warp + lane / 8 % 2 * 8]);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t pairs[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        pairs[m] = pack<Io>(x[8 * step + 2 * m], x[8 * step + 2 * m + 1]);
      }
      stmatrix_transposed(place + static_cast<uint32_t>(step) * kBlock * Traits::kStride * 2,
                          pairs);
    }
  }

  __device__ __forceinline__ void store_staged(GradRows which, const Tensor& t,
                                               const Io (&tile)[kChunk][Traits::kStride]) const {
    Io* const to = work.at<Io>(which);
    for (int e = warp * 32 + lane; e < work.chunk.rows * (K / 8); e += Traits::kThreads) {
      const int row = e / (K / 8);
      const int unit = e % (K / 8);
      *reinterpret_cast<uint4*>(to + row * t.stride[1] + unit * kUnitElements) =
          *reinterpret_cast<const uint4*>(&tile[row][unit * kUnitElements]);
    }
  }

  /// What combine_block left, once every warp has.
  template <int GATE>
  __device__ __forceinline__ void store_all(float (&S)[32], const float (&dkx)[32],
                                            const float (&W)[16]) const {
    const bool gates = p.dg.data != nullptr || p.partial != nullptr;
    if (gates) sum_tokens(W, dkx);
    store_dbeta();
    if (p.undo_l2norm) undo_norms(S);
    const bool staged = p.dq.dtype == kTypeOf<Io>;
    if (staged) {
      __syncwarp();  // q and k, whose place it takes, have been read
      stage(shared.q, S);
      stage(shared.k, S + 16);
    } else {
      store_fp32(kRowsDq, p.dq, S);
      store_fp32(kRowsDk, p.dk, S + 16);
    }
    __syncthreads();
    if (staged) {
      store_staged(kRowsDq, p.dq, shared.q);
      store_staged(kRowsDk, p.dk, shared.k);
    }
    if (gates) backward_gates<Io, K, GATE>(shared, p, work);
  }
};

}  // namespace kda::cuda::sm90
