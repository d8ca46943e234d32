// The first part of grad: inputs to shared memory, gates to G, and what CUDA cores take from the
// tiles of V.
#pragma once

#include <cuda/ptx>

#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma_sync.cuh"
#include "cuda/sm90/chunk_bwd/grad_shared.cuh"
#include "cuda/tile/ring.cuh"

namespace kda::cuda::sm90 {

namespace ptx = ::cuda::ptx;

/// Raw rows of q, k and g; zeros beyond the last.
template <class Io, int K>
__device__ __forceinline__ void load_key_rows(GradShared<Io, K>& shared, const GradParams& p,
                                              const GradWork& work) {
  using Traits = GradTraits<Io, K>;
  const auto load = [&]<class T>(T* to, GradRows which, int64_t stride) {
    constexpr int kUnit = 16 / sizeof(T);  // elements
    constexpr int kRowsAtOnce = Traits::kThreads / (K / kUnit);
    const int tid = thread_index();
    const int column = tid % (K / kUnit) * kUnit;
    int row = tid / (K / kUnit);
    const T* from = work.at<T>(which) + row * stride + column;
    uint32_t address = shared_address(to + row * Traits::kStride + column);
#pragma unroll
    for (int i = 0; i < kChunk / kRowsAtOnce; ++i) {
      // Nothing is read where the row does not exist.
      copy_async_16_or_zero(address, row < work.chunk.rows ? from : work.at<T>(which),
                            row < work.chunk.rows);
      row += kRowsAtOnce;
      from += kRowsAtOnce * stride;
      address += kRowsAtOnce * Traits::kStride * sizeof(T);
    }
  };
  load(&shared.q[0][0], kRowsQ, p.q.stride[1]);
  load(&shared.k[0][0], kRowsK, p.k.stride[1]);
  const int32_t dtype = p.gate.g.dtype;
  if (dtype == kBFloat16 || dtype == kFloat16) {
    load(reinterpret_cast<Bf16*>(shared.g), kRowsG, p.gate.g.stride[1]);  // bits, whichever type
  } else {
    load(&shared.g[0][0], kRowsG, p.gate.g.stride[1]);
  }
}

/// Columns v0 .. v0 + 63 of everything that has V: h and dh by TMA, the rest by all threads.
template <class Io, int K>
__device__ __forceinline__ void load_value_tiles(GradShared<Io, K>& shared,
                                                 const GradLaunchParams& p, const GradWork& work,
                                                 int v0) {
  constexpr int kRows = GradTraits<Io, K>::kValueRows;
  const int tid = thread_index();
  if (tid == 0) {
    const int32_t at[4] = {v0, 0, static_cast<int32_t>(work.pair.hv),
                           static_cast<int32_t>(work.pair.row)};
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared,
                                   &shared.states_full,
                                   (work.carries ? 1 : 2) * sizeof(shared.value.h));
    ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, shared.value.h, &p.h_map, at,
                              &shared.states_full);
    if (!work.carries) {
      ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, shared.value.dh, &p.dh_map,
                                at, &shared.states_full);
    }
  }
  const int column = v0 + tid % 8 * kUnitElements;
  const uint32_t place = unit_offset(tid / 8, tid % 8);
  const auto load_rows = [&](unsigned char* to, GradRows which, int64_t stride, int first = 0) {
    const Io* const from = work.at<Io>(which) + column;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      constexpr int kRowsAtOnce = kChunk / kRows;
      const int row = first + tid / 8 + i * kRowsAtOnce;
      const bool valid = row < work.chunk.rows;
      copy_async_16_or_zero(shared_address(to) + place + i * kRowsAtOnce * kPanelRowBytes,
                            from + (valid ? row : 0) * stride, valid);
    }
  };
  constexpr int kTile = kChunk * kPanelRowBytes;
  load_rows(shared.value.do_R, kRowsDo, p.grad_o.stride[1]);
  load_rows(shared.value.do_R + kTile, kRowsR, p.R.stride[1]);
  load_rows(shared.value.v, kRowsV, p.v.stride[1]);
  load_rows(shared.v_new, kRowsVNew, p.v_new.stride[1]);
  if (work.crosses) load_rows(shared.v_new + kTile, kRowsVNew, p.v_new.stride[1], -kChunk);
}

/// Two diagonals of 8 of d += a b^T over 16 columns: lanes with lane / 8 == lane % 4 hold those of
/// rows lane / 4 and lane / 4 + 8.
template <class Io>
struct Diagonal {
  float upper[4] = {};
  float lower[4] = {};

  /// Fragments of 16 rows; b in the order of ldmatrix for a.
  __device__ __forceinline__ void add(const uint32_t (&a)[4], const uint32_t (&b)[4]) {
    const uint32_t first[2] = {b[0], b[2]};
    const uint32_t second[2] = {b[1], b[3]};
    if constexpr (kIsBf16<Io>) {
      mma_bf16(upper, a, first);
      mma_bf16(lower, a, second);
    } else {
      mma_fp16(upper, a, first);
      mma_fp16(lower, a, second);
    }
  }
  __device__ __forceinline__ float2 rows(int lane) const {
    const bool odd = lane / 4 % 2 == 1;
    return {odd ? upper[1] : upper[0], odd ? lower[3] : lower[2]};
  }
};

/// 1 / |row| of q and k, 8 lanes a row.
template <class Io, int K>
__device__ __forceinline__ void find_norms(GradShared<Io, K>& shared, const GradParams& p) {
  const int tid = thread_index();
  constexpr int kRowsAtOnce = GradTraits<Io, K>::kThreads / 8;
  constexpr int kRows = 2 * kChunk / kRowsAtOnce;
  float sums[kRows] = {};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = tid / 8 + i * kRowsAtOnce;
    const Io* const data = row < kChunk ? shared.q[row] : shared.k[row - kChunk];
#pragma unroll
    for (int piece = 0; piece < K / 64; ++piece) {
      const uint4 x = *reinterpret_cast<const uint4*>(data + 64 * piece + tid % 8 * 8);
      for (const uint32_t pair : {x.x, x.y, x.z, x.w}) {
        const float2 y = unpack<Io>(pair);
        sums[i] = fmaf(y.x, y.x, fmaf(y.y, y.y, sums[i]));
      }
    }
  }
#pragma unroll
  for (int step = 4; step > 0; step /= 2) {
#pragma unroll
    for (float& sum : sums) sum += __shfl_xor_sync(~0u, sum, step);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = tid / 8 + i * kRowsAtOnce;
    if (tid % 8 == 0) {
      shared.norm[row / kChunk][row % kChunk] = p.qk_l2norm ? rsqrtf(sums[i] + 1e-6f) : 1.f;
    }
  }
}

/// kg and 2^G_end of the chunk before, by one thread.
template <class Io, int K>
__device__ __forceinline__ void load_update(GradShared<Io, K>& shared, const GradParams& p,
                                            const GradWork& work) {
  const std::byte* const record =
      p.records + (work.record * p.heads.HV + work.pair.hv) * Record<K>::kBytes;
  constexpr uint32_t kPanel = kChunk * kPanelRowBytes;
  constexpr uint32_t kDecays = sizeof(shared.decay_before);
  ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared,
                                 &shared.update_full, K / 64 * kPanel + kDecays);
#pragma unroll
  for (int i = 0; i < K / 64; ++i) {
    ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, shared.intra.keys[i].update,
                       record + Record<K>::kUpdate + i * kPanel, kPanel, &shared.update_full);
  }
  ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, shared.decay_before,
                     record + Record<K>::kDecay, kDecays, &shared.update_full);
}

/// What a thread fetches of beta, dt_bias and A_log for its next item, as it is in memory: a token,
/// a channel, the head.
struct GradScalars {
  RawElement<float> beta;
  float bias;
  float A_log;
};

__device__ __forceinline__ GradScalars load_scalars(const GradParams& p, const GradWork& work) {
  const int tid = thread_index();
  GradScalars x{};
  if (tid < work.chunk.rows) {
    x.beta = load_raw<float>(
        p.beta, token_offset(p.beta, work.chunk.batch, work.chunk.begin + tid, work.pair.hv));
  }
  if (p.gate.kind == kGateNone) return x;
  if (tid < p.heads.K) x.bias = bias_of(p.gate, work.pair.hv, tid);
  if (tid == 0) x.A_log = A_log_of(p.gate, work.pair.hv);
  return x;
}

template <class Io, int K>
__device__ __forceinline__ void put_scalars(GradShared<Io, K>& shared, const GradParams& p,
                                            int rows, const GradScalars& raw) {
  const int tid = thread_index();
  if (tid < K) shared.bias[tid] = raw.bias;
  if (tid == 0 && p.gate.kind != kGateNone) shared.gate = fast_gate_from(p.gate, raw.A_log);
  if (tid >= kChunk) return;
  float beta = 0;
  float slope = 1;
  if (tid < rows) {
    beta = convert<float>(raw.beta, p.beta.dtype);
    if (p.beta_sigmoid) {
      slope = p.beta_factor * sigmoid(beta) * sigmoid(-beta);
      beta = p.beta_factor * sigmoid(beta);
    }
  }
  shared.beta[tid] = beta;
  shared.beta_slope[tid] = slope;
}

/// g itself, clamped.
struct GivenGate {
  __device__ __forceinline__ float operator()(const FastGate&, float g) const {
    return fast_no_gate(g);
  }
  static __device__ __forceinline__ GateGradient<float> gradient(const FastGate&, float g,
                                                                 float dg) {
    return fast_no_gate_gradient(g, dg);
  }
};

/// Calls f with the functions of a gate: GATE is a value of GateParams::kind.
template <int GATE, class F>
__device__ __forceinline__ void with_gate_of(const FastGate& gate, F f) {
  if constexpr (GATE == kGateNone) {
    f(GivenGate{});
  } else if constexpr (GATE == kGateSoftplus) {
    gate.far ? f(FarSoftplusGate{}) : f(FastSoftplusGate{});
  } else {
    gate.far ? f(FarBoundedGate{}) : f(FastBoundedGate{});
  }
}

/// Calls f with the rows of raw gates, kStride elements apart.
template <class Io, int K, class F>
__device__ __forceinline__ void with_raw_gates(const GradShared<Io, K>& shared, int32_t dtype,
                                               F f) {
  if (dtype == kBFloat16) {
    f(reinterpret_cast<const Bf16*>(shared.g));
  } else if (dtype == kFloat16) {
    f(reinterpret_cast<const __half*>(shared.g));
  } else {
    f(&shared.g[0][0]);
  }
}

/// G of this thread's tokens of a column pair, as if they were the chunk's first; their sum to
/// `totals`. In registers they would stand beside all accumulators.
template <int GATE, class Io, int K>
__device__ __forceinline__ void sum_decays(GradShared<Io, K>& shared, const GradParams& p,
                                           int rows) {
  constexpr int kTokens = GradTraits<Io, K>::kTokens;
  const ColumnPair<Io, K> at;
  const int first = at.segment * kTokens;
  const FastGate gate = shared.gate;
  const float2 bias = pair_at(shared.bias, at.column);
  float2 running{0, 0};
#pragma unroll 1
  for (int t0 = first; t0 < first + kTokens; t0 += kTokens / 2) {
    float2 g[kTokens / 2];
    with_raw_gates(shared, p.gate.g.dtype, [&](const auto* gates) {
#pragma unroll
      for (int t = 0; t < kTokens / 2; ++t) {
        g[t] = pair_at(gates + (t0 + t) * GradTraits<Io, K>::kStride, at.column);
      }
    });
    with_gate_of<GATE>(gate, [&](auto kind) {
#pragma unroll
      for (int t = 0; t < kTokens / 2; ++t) {
        const float2 d{kind(gate, g[t].x + bias.x), kind(gate, g[t].y + bias.y)};
        if (t0 + t < rows) running = running + d;
        put_pair(&shared.G[t0 + t][at.column], running);
      }
    });
  }
  put_pair(&shared.totals[at.segment][at.column], running);
}

/// Adds the decays of the segments before.
template <class Io, int K>
__device__ __forceinline__ void join_segments(GradShared<Io, K>& shared) {
  constexpr int kTokens = GradTraits<Io, K>::kTokens;
  const ColumnPair<Io, K> at;
  if (at.segment == 0) return;
  float2 before{0, 0};
#pragma unroll
  for (int s = 0; s < kChunk / kTokens - 1; ++s) {
    const float2 total = pair_at(shared.totals[s], at.column);
    if (s < at.segment) before = before + total;
  }
  float* const G = &shared.G[at.segment * kTokens][at.column];
  constexpr int kStride = GradTraits<Io, K>::kGStride;
  constexpr int kAtOnce = kTokens / 2;
#pragma unroll
  for (int t0 = 0; t0 < kTokens; t0 += kAtOnce) {
    float2 sums[kAtOnce];
#pragma unroll
    for (int t = 0; t < kAtOnce; ++t) sums[t] = before + pair_at(G + (t0 + t) * kStride, 0);
#pragma unroll
    for (int t = 0; t < kAtOnce; ++t) put_pair(G + (t0 + t) * kStride, sums[t]);
  }
}

template <class Io>
__device__ __forceinline__ float dot(uint4 a, uint4 b, float sum) {
  const uint32_t x[4] = {a.x, a.y, a.z, a.w};
  const uint32_t y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 u = unpack<Io>(x[i]);
    const float2 w = unpack<Io>(y[i]);
    sum = fmaf(u.x, w.x, fmaf(u.y, w.y, sum));
  }
  return sum;
}

/// rowsum_V(h . dh) of 16 channels of a warp: the diagonal of h dh^T.
template <class Io, int K>
__device__ __forceinline__ float2 multiply_states(const GradShared<Io, K>& shared, float2 sum) {
  const int lane = thread_index() % 32;
  const uint32_t place = unit_offset(thread_index() / 32 * 16 + lane % 16, lane / 16);
  Diagonal<Io> products;
#pragma unroll
  for (int step = 0; step < kGradColumns / 16; ++step) {
    uint32_t h[4];
    uint32_t dh[4];
    const uint32_t at = place ^ static_cast<uint32_t>(step << 5);
    ldmatrix(h, shared_address(shared.value.h) + at);
    ldmatrix(dh, shared_address(shared.value.dh) + at);
    products.add(h, dh);
  }
  const float2 rows = products.rows(lane);
  return {sum.x + rows.x, sum.y + rows.y};
}

/// dv = beta R (5.11) and rowsum_V(R . v) of one unit of each row of this thread.
template <class Io, int K, int ROWS>
__device__ __forceinline__ void finish_values(const GradShared<Io, K>& shared, const GradParams& p,
                                              const GradWork& work, int v0, float unit_of_R,
                                              float (&sum)[ROWS]) {
  const int unit = thread_index() % 8;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int row = thread_index() / 8 + i * (kChunk / ROWS);
    if (row >= work.chunk.rows) continue;
    const uint4 R =
        *reinterpret_cast<const uint4*>(shared.value.do_R + unit_offset(kChunk + row, unit));
    const uint4 v = *reinterpret_cast<const uint4*>(shared.value.v + unit_offset(row, unit));
    sum[i] = dot<Io>(R, v, sum[i]);
    if (p.dv.data == nullptr) continue;
    const float factor = unit_of_R * shared.beta[row];
    const auto scaled = [&](uint32_t pair) {
      const float2 x = unpack<Io>(pair);
      return pack<Io>(factor * x.x, factor * x.y);
    };
    Io* const to = work.at<Io>(kRowsDv) + row * p.dv.stride[1] + v0 + unit * kUnitElements;
    *reinterpret_cast<uint4*>(to) = uint4{scaled(R.x), scaled(R.y), scaled(R.z), scaled(R.w)};
  }
}

}  // namespace kda::cuda::sm90
