// The last part of grad: (5.32), (5.33), the backward of l2norm, gates and beta, and the stores.
#pragma once

#include "cuda/ptx/stmatrix.cuh"
#include "cuda/sm90/chunk_bwd/grad_gates.cuh"
#include "cuda/sm90/chunk_bwd/grad_intra.cuh"

namespace kda::cuda::sm90 {

/// A token's gradients in the order of GradShared::sums.
enum GradSum : int { kKeySum, kQueryNorm, kKeyNorm };

template <int K>
struct GradFinish {
  using Traits = GradTraits<K>;

  GradShared<K>& shared;
  const GradParams& p;
  const GradWork& work;
  int warp;
  int lane;
  GradLane at;

  __device__ GradFinish(GradShared<K>& memory, const GradParams& params, const GradWork& what,
                        int warp_of, int lane_of)
      : shared(memory), p(params), work(what), warp(warp_of), lane(lane_of), at(warp_of, lane_of) {}

  __device__ __forceinline__ ChannelGate gate_of(int c) const {
    return channel_gate(shared, at.channel(c));
  }
  __device__ __forceinline__ float q(int i, int c, int e) const {
    const int t = at.token(i, e);
    return __bfloat162float(shared.q[t][at.channel(c)]) * shared.norm[0][t];
  }
  __device__ __forceinline__ float k(int i, int c, int e) const {
    const int t = at.token(i, e);
    return __bfloat162float(shared.k[t][at.channel(c)]) * shared.norm[1][t];
  }
  /// S = [dqe | Y] -> [dq1 | 2^G Y] but the rows' factor: 2^G = 2^first 2^(G - first).
  __device__ __forceinline__ void scale_rows(float (&S)[32]) const {
    const ChannelGate gate[2] = {gate_of(0), gate_of(1)};
    float entering[2][2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int block = 0; block < 2; ++block) entering[c][block] = exp2_of(gate[c].first[block]);
    }
    GradLane::each([&](int r, int i, int c, int) {
      S[r] *= p.scale * entering[c][i / 2];
      S[16 + r] *= -p.mantissa * entering[c][i / 2];
    });
  }

  /// A rounded operand of the intra products.
  static __device__ __forceinline__ float operand(const unsigned char* panel, int row, int k) {
    return __bfloat162float(
        *reinterpret_cast<const Bf16*>(panel + unit_offset(row, k % 64 / 8) + k % 8 * 2));
  }

  /// (5.32) of everything but far pairs: S -> [dq | dk], dkx -> k . dkx, W, and each token's sums
  /// over this thread's channels. x is dkc before the columns' factors, arranged.
  ///
  /// A pair of tokens enters W of both with opposite signs, and dg of the tokens before takes the
  /// sum. There the rounding of its operands has to cancel too, so W multiplies the sums by the
  /// operands as they were rounded.
  __device__ __forceinline__ void combine(float (&S)[32], float (&dkx)[16], const float (&x)[24],
                                          float (&W)[16], float (&sums)[3][8]) const {
    const ChannelGate gate[2] = {gate_of(0), gate_of(1)};
    const unsigned char* const rows = shared.intra.rows[warp / 4];
    const unsigned char* const columns = shared.intra.columns[warp / 4];
    GradLane::each([&](int r, int i, int c, int e) {
      const int t = at.token(i, e);
      const int channel = at.channel(c);
      const int block = i / 2;
      const float g = shared.G[t][channel];
      const float down = gate[c].far[block] ? 0 : exp2_of(gate[c].first[block] - g);
      const float diagonal = x[r + 8 * block];
      float w =
          fmaf(operand(rows, t, channel), S[r], operand(rows, kChunk + t, channel) * S[16 + r]);
      w = fmaf(-operand(columns, t + block * kBlock, channel), diagonal, w);
      float dkc = down * diagonal;
      if (block == 0) {
        w = fmaf(-operand(columns, kBlock + t, channel), x[8 + r], w);
        dkc = fmaf(exp2_of(gate[c].first[1] - g), x[8 + r], dkc);
      }
      W[r] = w;
      const float up = exp2_of(g - gate[c].first[block]);
      const float y = q(i, c, e);
      const float z = k(i, c, e);
      const float d = shared.diagonal[t];
      const float kr = up * S[16 + r];
      const float last = p.mantissa * exp2_of(gate[c].end - g) * dkx[r];
      S[r] = fmaf(d, z, up * S[r]);
      S[16 + r] = fmaf(shared.beta[t], kr, last) + fmaf(d, y, dkc);
      dkx[r] = last * z;
      sums[kKeySum][2 * i + e] += kr * z;
      sums[kQueryNorm][2 * i + e] += S[r] * y;
      sums[kKeyNorm][2 * i + e] += S[16 + r] * z;
    });
  }

  /// One element at a time: unrolled, the rare path would take the common one's registers.
  __device__ __forceinline__ void add_far(float (&S)[32], float (&W)[16],
                                          float (&sums)[3][8]) const {
#pragma unroll 1
    for (int r = 0; r < 16; ++r) {
      const int c = r / 2 % 2;
      const ChannelGate gate = gate_of(c);
      if (!(r < 8 ? gate.far[0] : gate.far[1])) continue;
      const int t = at.token(r / 4, r % 2);
      const float3 sum = far_sums(shared, t, at.channel(c));
      const float y = q(r / 4, c, r % 2);
      const float z = k(r / 4, c, r % 2);
      const float row = shared.beta[t] * sum.y;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        S[i] += i == r ? sum.x : 0;
        S[16 + i] += i == r ? row + sum.z : 0;
        W[i] += i == r ? fmaf(y, sum.x, z * (row - sum.z)) : 0;
      }
#pragma unroll
      for (int token = 0; token < 8; ++token) {
        const bool own = token == r / 4 * 2 + r % 2;
        sums[kKeySum][token] += own ? sum.y * z : 0;
        sums[kQueryNorm][token] += own ? sum.x * y : 0;
        sums[kKeyNorm][token] += own ? (row + sum.z) * z : 0;
      }
    }
  }

  /// Sums over the channels of a warp of x[token][..], to `partial`.
  __device__ __forceinline__ void put_sums(int which, float (&x)[8]) const {
#pragma unroll
    for (int t = 0; t < 8; ++t) {
      for (int step = 4; step < 32; step *= 2) x[t] += __shfl_xor_sync(~0u, x[t], step);
    }
    if (lane >= 4) return;
#pragma unroll
    for (int t = 0; t < 8; ++t) shared.partial[which][warp][at.token(t / 2, t % 2)] = x[t];
  }

  /// (3.13) behind a sigmoid.
  __device__ __forceinline__ void store_dbeta(int t, float dbeta) const {
    const int64_t token = work.chunk.begin + t;
    if (p.beta_sigmoid) {
      const float x = load<float>(p.beta, token_offset(p.beta, work.chunk.batch, token, work.hv));
      dbeta *= p.beta_factor * sigmoid(x) * sigmoid(-x);
    }
    store<float>(p.dbeta, token_offset(p.dbeta, work.chunk.batch, token, work.hv), dbeta);
  }

  /// Adds the warps' sums; dbeta.
  __device__ __forceinline__ void finish_sums() const {
    const int tid = warp * 32 + lane;
    for (int e = tid; e < 3 * kChunk; e += Traits::kThreads) {
      const int which = e / kChunk;
      const int t = e % kChunk;
      if (which != kKeySum && !p.undo_l2norm) continue;
      float sum = 0;
#pragma unroll
      for (int w = 0; w < Traits::kWarps; ++w) sum += shared.partial[which][w][t];
      shared.sums[which][t] = sum;
      if (which == kKeySum && t < work.chunk.rows && p.dbeta.data != nullptr) {
        store_dbeta(t, fmaf(p.mantissa, shared.value_product[t], sum));
      }
    }
  }

  /// (3.3).
  __device__ __forceinline__ void undo_norms(float (&S)[32]) const {
    GradLane::each([&](int r, int i, int c, int e) {
      const int t = at.token(i, e);
      S[r] = shared.norm[0][t] * fmaf(-q(i, c, e), shared.sums[kQueryNorm][t], S[r]);
      S[16 + r] = shared.norm[1][t] * fmaf(-k(i, c, e), shared.sums[kKeyNorm][t], S[16 + r]);
    });
  }

  /// (5.33), over G of this warp's channels. Sums from the last token on of W and of all tokens
  /// before of k . dkx.
  __device__ __forceinline__ void sum_tokens(const float (&W)[16], const float (&X)[16]) const {
    const float end[2] = {shared.G[kChunk - 1][at.channel(0)], shared.G[kChunk - 1][at.channel(1)]};
    __syncwarp();
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int channel = at.channel(c);
      float before = p.mantissa * exp2_of(end[c]) *
                     (shared.state_product[0][channel] + shared.state_product[1][channel]);
      float dg[8];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = X[4 * i + 2 * c];
        float sum = x + X[4 * i + 2 * c + 1];
        for (int step = 1; step < 4; step *= 2) {
          const float other = __shfl_up_sync(~0u, sum, step, 4);
          if (lane % 4 >= step) sum += other;
        }
        float own = __shfl_up_sync(~0u, sum, 1, 4);
        own = before + (lane % 4 == 0 ? 0 : own);
        dg[2 * i] = own;
        dg[2 * i + 1] = own + x;
        before += __shfl_sync(~0u, sum, 3, 4);
      }
      float after = 0;
#pragma unroll
      for (int i = 3; i >= 0; --i) {
        const float w = W[4 * i + 2 * c + 1];
        float sum = W[4 * i + 2 * c] + w;
        for (int step = 1; step < 4; step *= 2) {
          const float other = __shfl_down_sync(~0u, sum, step, 4);
          if (lane % 4 + step < 4) sum += other;
        }
        float own = __shfl_down_sync(~0u, sum, 1, 4);
        own = after + (lane % 4 == 3 ? 0 : own) + w;
        dg[2 * i + 1] += own;
        dg[2 * i] += own + W[4 * i + 2 * c];
        after += __shfl_sync(~0u, sum, 0, 4);
      }
#pragma unroll
      for (int t = 0; t < 8; ++t) shared.G[at.token(t / 2, t % 2)][channel] = dg[t];
    }
  }

  /// Rows of fp32: eight lanes fill a sector.
  __device__ __forceinline__ void store_fp32(const Tensor& t, const float* x) const {
    float* const to =
        static_cast<float*>(t.data) + token_offset(t, work.chunk.batch, work.chunk.begin, work.hv);
    GradLane::each([&](int r, int i, int c, int e) {
      const int token = at.token(i, e);
      if (token < work.chunk.rows) to[token * t.stride[1] + at.channel(c)] = x[r];
    });
  }

  __device__ __forceinline__ void stage(int place, const float* x) const {
    const TransposedLane lines(warp % 4, lane);
    const uint32_t panel = shared_address(shared.staging[place][warp / 4]);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t pairs[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        pairs[m] = pack<Bf16>(x[8 * step + 2 * m], x[8 * step + 2 * m + 1]);
      }
      stmatrix_transposed(panel + lines.offset(step), pairs);
    }
  }

  __device__ __forceinline__ void store_staged(const Tensor& t, int place) const {
    Bf16* const to =
        static_cast<Bf16*>(t.data) + token_offset(t, work.chunk.batch, work.chunk.begin, work.hv);
    for (int e = warp * 32 + lane; e < work.chunk.rows * (K / 8); e += Traits::kThreads) {
      const int row = e / (K / 8);
      const int unit = e % (K / 8);
      *reinterpret_cast<uint4*>(to + row * t.stride[1] + unit * kUnitElements) =
          *reinterpret_cast<const uint4*>(shared.staging[place][unit / 8] +
                                          unit_offset(row, unit % 8));
    }
  }

  /// S with the intra products on it, dkx and x as the products left them: S -> [dq | dk], dkx ->
  /// k . dkx, W. The last reader of the operands.
  __device__ __forceinline__ void combine_all(float (&S)[32], float (&dkx)[16],
                                              const float (&x)[24], float (&W)[16],
                                              bool has_far) const {
    float sums[3][8] = {};
    combine(S, dkx, x, W, sums);
    if (has_far) add_far(S, W, sums);
    put_sums(kKeySum, sums[kKeySum]);
    if (!p.undo_l2norm) return;
    put_sums(kQueryNorm, sums[kQueryNorm]);
    put_sums(kKeyNorm, sums[kKeyNorm]);
  }

  /// What combine_all left, once every warp has.
  __device__ __forceinline__ void store_all(float (&S)[32], const float (&dkx)[16],
                                            const float (&W)[16]) const {
    finish_sums();
    const bool gates = p.dg.data != nullptr || p.partial != nullptr;
    if (gates) sum_tokens(W, dkx);
    __syncthreads();
    if (p.undo_l2norm) undo_norms(S);
    const bool staged = p.dq.dtype == kBFloat16;
    if (staged) {
      stage(0, S);
      stage(1, S + 16);
    } else {
      store_fp32(p.dq, S);
      store_fp32(p.dk, S + 16);
    }
    if (gates) backward_gates(shared, p, work);
    __syncthreads();
    if (staged) {
      store_staged(p.dq, 0);
      store_staged(p.dk, 1);
    }
    if (gates) store_partial(shared, p, work);
  }
};

}  // namespace kda::cuda::sm90
