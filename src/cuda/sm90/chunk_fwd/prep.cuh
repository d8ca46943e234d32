// prep: raw q, k, g, beta of one chunk of 32 tokens and one value head -> its record (config.h).
//
// Grid: one block of 128 threads for each (chunk, value head), heads fastest, so that blocks that
// run together read neighbouring heads of the same tokens.
//
// Phases (a barrier between them):
//   1 load    q, k into shared memory (cp.async); g, beta into registers
//   2 decay   thread = a column pair and 32 / kSegments consecutive tokens: gate, running sum G in
//             log2; row norms of q and k, 8 lanes a row; sums of the segments through `totals`
//   3 tiles   the same threads: k 2^G, q 2^G, k 2^(G_end - G) to the record; the scaled tiles of
//             scores.cuh to shared memory
//   4 scores  q k^T and k k^T (scores.cuh)
//   5 solve   warp 0: (I + L)^-1, 16 x 16 blocks by forward substitution, lane = column;
//             warps 1..3: scores to the record
//
// Row i never depends on a later token, not even through rounding: o of a prefix is bit for bit the
// same whatever follows.
//
// Shared memory, K = 128, bf16 (fp16): q, k 2 x 8704 (52224 with their fp32 tiles); down, cross
// 13056 (26112), later scores and L; totals, firsts 2048; norms, beta 384 = 32896 (80768) bytes.
#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "cuda/sm90/chunk_fwd/scores.cuh"
#include "cuda/tile/shared_memory.cuh"

namespace kda::cuda::sm90 {

inline constexpr int32_t kBFloat16 = 1;  ///< values of kda::DType
inline constexpr int32_t kFloat16 = 2;

/// chunk_of for a grid's worth of chunks, without 64-bit division.
__device__ __forceinline__ Chunk small_chunk_of(const Sequences& s, uint32_t row) {
  if (s.cu.data) return chunk_of(s, row);
  const auto per_row = static_cast<uint32_t>(s.chunks_per_row);
  const uint32_t batch = row / per_row;
  const int64_t begin = int64_t{row - batch * per_row} * kChunk;
  const int64_t rest = s.T - begin;
  return {batch, begin, static_cast<int32_t>(rest < kChunk ? rest : kChunk)};
}

/// Rows of q or k into shared memory; zeros from `rows` on.
template <class Io, int K, int Stride>
__device__ __forceinline__ void load_rows(Io (&shared)[kChunk][Stride], const Tensor& t,
                                          const Chunk& chunk, int64_t head) {
  constexpr int kPieces = K / 8;
  const Io* data = static_cast<const Io*>(t.data) + token_offset(t, chunk.batch, chunk.begin, head);
#pragma unroll
  for (int piece = thread_index(); piece < kChunk * kPieces; piece += kPrepThreads) {
    const int row = piece / kPieces;
    const int column = piece % kPieces * 8;
    if (row < chunk.rows) {
      copy_async_16(&shared[row][column], data + row * t.stride[1] + column);
    } else {
      *reinterpret_cast<uint4*>(&shared[row][column]) = uint4{};
    }
  }
}

/// Two neighbouring elements, aligned together.
__device__ __forceinline__ float2 load_pair(const __nv_bfloat16* p) {
  return unpack<__nv_bfloat16>(*reinterpret_cast<const uint32_t*>(p));
}
__device__ __forceinline__ float2 load_pair(const __half* p) {
  return unpack<__half>(*reinterpret_cast<const uint32_t*>(p));
}
__device__ __forceinline__ float2 load_pair(const float* p) {
  return *reinterpret_cast<const float2*>(p);
}

/// Column pairs of g for this thread's tokens, as they are in memory; 0 beyond the last row.
template <int TOKENS>
__device__ __forceinline__ void load_gates(float2 (&z)[TOKENS], const Tensor& g, const Chunk& chunk,
                                           int64_t hv, int first, int column) {
  const auto load_as = [&]<class T>(const T* data) {
    data += token_offset(g, chunk.batch, chunk.begin + first, hv) + column;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      z[t] = first + t < chunk.rows ? load_pair(data) : float2{0, 0};
      data += g.stride[1];
    }
  };
  if (g.dtype == kBFloat16) {
    load_as(static_cast<const __nv_bfloat16*>(g.data));
  } else if (g.dtype == kFloat16) {
    load_as(static_cast<const __half*>(g.data));
  } else {
    load_as(static_cast<const float*>(g.data));
  }
}

/// x[t] = sum of decay(x[0..t]) over the rows that exist.
template <int TOKENS, class Decay>
__device__ __forceinline__ void sum_rows(float2 (&x)[TOKENS], int rows, Decay decay) {
  float2 sum{0, 0};
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    const float2 d = decay(x[t]);
    if (t < rows) sum = {sum.x + d.x, sum.y + d.y};
    x[t] = sum;
  }
}

/// Raw gates -> the running sum of log2 decays over this thread's tokens, of which `rows` exist.
template <int TOKENS>
__device__ __forceinline__ void sum_gates(float2 (&G)[TOKENS], const GateParams& params, int64_t hv,
                                          int rows, int column) {
  if (params.kind == kGateNone) {
    sum_rows(G, rows, [](float2 z) -> float2 { return {fast_no_gate(z.x), fast_no_gate(z.y)}; });
    return;
  }
  const FastGate gate = fast_gate_of(params, hv);
  const auto sum = [&](auto value) {
    const float x = bias_of(params, hv, column);
    const float y = bias_of(params, hv, column + 1);
    sum_rows(G, rows, [&](float2 z) -> float2 {
      return {value(gate, z.x + x), value(gate, z.y + y)};
    });
  };
  with_gate(params, gate, sum);
}

/// 1 / |row| of q and k: 8 lanes a row.
template <class Io, int K>
__device__ __forceinline__ void norm_rows(PrepShared<Io, K>& shared, bool wanted) {
  const int lane = thread_index() % 8;
#pragma unroll
  for (int pass = 0; pass < 2 * kChunk * 8 / kPrepThreads; ++pass) {
    const int row = pass * kPrepThreads / 8 + thread_index() / 8;
    const Io* data = row < kChunk ? shared.rows.raw_q()[row] : shared.rows.raw_k()[row - kChunk];
    float r = 1;
    if (wanted) {
      float sum = 0;
#pragma unroll
      for (int piece = 0; piece < K / 64; ++piece) {
        const uint4 x = *reinterpret_cast<const uint4*>(data + 64 * piece + 8 * lane);
        for (const uint32_t pair : {x.x, x.y, x.z, x.w}) {
          const float2 v = unpack<Io>(pair);
          sum = fmaf(v.x, v.x, fmaf(v.y, v.y, sum));
        }
      }
      for (int step = 4; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      r = rsqrtf(sum + 1e-6f);
    }
    if (lane == 0) (row < kChunk ? shared.rq[row] : shared.rk[row - kChunk]) = r;
  }
}

__device__ __forceinline__ void load_beta(float* beta, const PrepParams& p, const Chunk& chunk,
                                          int64_t hv) {
  const int row = thread_index();
  if (row >= kChunk) return;
  float x = 0;
  if (row < chunk.rows) {
    x = load<float>(p.beta, token_offset(p.beta, chunk.batch, chunk.begin + row, hv));
    if (p.beta_sigmoid) x = p.beta_factor * sigmoid(x);
  }
  beta[row] = x;
}

/// Stores a column pair into a tile.
__device__ __forceinline__ void put_pair(__nv_bfloat16* to, float2 x) {
  *reinterpret_cast<uint32_t*>(to) = pack<__nv_bfloat16>(x.x, x.y);
}
__device__ __forceinline__ void put_pair(float* to, float2 x) {
  *reinterpret_cast<float2*>(to) = x;
}

/// What a thread knows of its column pair beyond its own tokens.
struct ColumnDecay {
  float2 end;        ///< G of the chunk's last row
  float2 reference;  ///< G of the first row of its block of 16
  float2 next;       ///< G of row 16
};

__device__ __forceinline__ void store_global(uintptr_t address, uint32_t value) {
  auto* const to = reinterpret_cast<uint32_t*>(address);
  __builtin_assume(__isGlobal(to));
  *to = value;
}

/// Phase 3 for one thread: tokens first .. of a column pair. Rows that do not exist hold zeros.
template <class Io, int K, bool InFirstBlock>
__device__ __forceinline__ void write_tiles(PrepShared<Io, K>& shared, std::byte* record,
                                            const float2 (&G)[PrepTraits<Io, K>::kTokens],
                                            const ColumnDecay& decay, int first, int column) {
  using R = Record<K>;
  constexpr int kTokens = PrepTraits<Io, K>::kTokens;
  // Records start at multiples of 128 bytes: the swizzle is an XOR of address bits 4 to 6.
  const int place = first * kPanelRowBytes + column % 64 * 2;
  const auto read = reinterpret_cast<uintptr_t>(record + R::kRead + column / 64 * 8192 + place);
  const auto update = reinterpret_cast<uintptr_t>(record + R::kUpdate + column / 64 * 4096 + place);
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    const int row = first + t;
    const float2 q = pair_at(shared.rows.raw_q()[row], column) * shared.rq[row];
    const float2 k = pair_at(shared.rows.raw_k()[row], column) * shared.rk[row];
    const float2 entering = exp2_pair(G[t]);
    const float2 leaving = exp2_pair(decay.end - G[t]);
    // Where a thread has a whole block, its first row is at hand.
    const float2 below = G[t] - (kTokens == kBlock ? G[0] : decay.reference);
    const float2 up = exp2_pair(below);
    put_pair(&shared.rows.q[row][column], q * up);
    put_pair(&shared.rows.k[row][column], k * up);
    put_pair(&shared.down[row][column], k * exp2_pair({-below.x, -below.y}));
    if constexpr (InFirstBlock) {
      put_pair(&shared.cross[row][column], k * exp2_pair(decay.next - G[t]));
    }
    const uintptr_t swizzle = t % 8 << 4;
    const int offset = t * kPanelRowBytes;
    const float2 ke = k * entering;
    const float2 qe = q * entering;
    const float2 kg = k * leaving;
    store_global((read ^ swizzle) + offset, pack<Io>(ke.x, ke.y));
    store_global((read ^ swizzle) + offset + 4096, pack<Io>(qe.x, qe.y));
    store_global((update ^ swizzle) + offset, pack<Io>(kg.x, kg.y));
  }
}

/// Sums of whole segments before this thread's, of all, and at the rows that others refer to.
template <class Io, int K>
__device__ __forceinline__ ColumnDecay add_segments(const PrepShared<Io, K>& shared,
                                                    float2 (&G)[PrepTraits<Io, K>::kTokens],
                                                    int segment, int column) {
  constexpr int kSegments = PrepTraits<Io, K>::kSegments;
  constexpr int kPerBlock = kSegments / 2;
  float2 sums[kSegments];  // G before each segment
  float2 sum{0, 0};
#pragma unroll
  for (int s = 0; s < kSegments; ++s) {
    sums[s] = sum;
    const float2 total = pair_at(shared.totals[s], column);
    sum = {sum.x + total.x, sum.y + total.y};
  }
  const auto first_of = [&](int s) -> float2 {
    const float2 first = pair_at(shared.firsts[s], column);
    return {sums[s].x + first.x, sums[s].y + first.y};
  };
  ColumnDecay decay;
  decay.end = sum;
  decay.next = first_of(kPerBlock);
  decay.reference = segment < kPerBlock ? first_of(0) : decay.next;
#pragma unroll
  for (int s = 0; s < kSegments; ++s) {
    if (s != segment) continue;
#pragma unroll
    for (float2& x : G) x = {x.x + sums[s].x, x.y + sums[s].y};
  }
  return decay;
}

template <class Io, int K>
__global__ void __launch_bounds__(kPrepThreads, kIsBf16<Io> ? kPrepBlocksPerSm : 2)
    sm90_chunk_fwd_prep(const __grid_constant__ PrepParams p) {
  using Traits = PrepTraits<Io, K>;
  auto& shared = *shared_memory<PrepShared<Io, K>>();
  const int tid = thread_index();
  const int column = tid % Traits::kPairs * 2;
  const int segment = tid / Traits::kPairs;
  const int first = segment * Traits::kTokens;
  const auto HV = static_cast<uint32_t>(p.heads.HV);
  const auto count = static_cast<uint32_t>(p.sequences.chunk_rows) * HV;
  const uint32_t per_row =
      p.sequences.cu.data ? 1 : static_cast<uint32_t>(p.sequences.chunks_per_row);
  const uint32_t batches = static_cast<uint32_t>(p.sequences.chunk_rows) / per_row;
  const auto record_of = [&](uint32_t item) {
    if (p.sequences.cu.data) return item;
    const uint32_t hv = item % HV;
    const uint32_t row = item / HV;
    return (row % batches * per_row + row / batches) * HV + hv;
  };
  if (p.ready) {
    for (uint32_t i = tid; blockIdx.x + i * gridDim.x < count; i += kPrepThreads)
      p.ready[record_of(blockIdx.x + i * gridDim.x)] = 0;
    __threadfence();
    __syncthreads();
    cudaTriggerProgrammaticLaunchCompletion();
  }
  for (uint32_t item = blockIdx.x; item < count; item += gridDim.x) {
    const int tid = thread_index();
    const int column = tid % Traits::kPairs * 2;
    const int segment = tid / Traits::kPairs;
    const int first = segment * Traits::kTokens;
    const uint32_t index = record_of(item);
    const uint32_t hv = index % HV;
    const uint32_t head = hv / static_cast<uint32_t>(p.heads.group);
    const Chunk chunk = small_chunk_of(p.sequences, index / HV);
    if (chunk.rows == 0) continue;
    std::byte* const record = p.records + int64_t{index} * Record<K>::kBytes;
    __syncthreads();
    load_rows<Io, K>(shared.rows.raw_q(), p.q, chunk, head);
    load_rows<Io, K>(shared.rows.raw_k(), p.k, chunk, head);
    commit_copies();
    float2 G[Traits::kTokens];
    const auto sum_own_gates = [&] {
      load_gates(G, p.gate.g, chunk, hv, first, column);
      sum_gates(G, p.gate, hv, chunk.rows - first, column);
    };
    sum_own_gates();
    load_beta(shared.beta, p, chunk, hv);
    *reinterpret_cast<float2*>(&shared.firsts[segment][column]) = G[0];
    *reinterpret_cast<float2*>(&shared.totals[segment][column]) = G[Traits::kTokens - 1];
    wait_for_copies<0>();
    __syncthreads();
    norm_rows(shared, p.qk_l2norm);
    const ColumnDecay decay = add_segments(shared, G, segment, column);
    const float2 range = decay.reference - G[Traits::kTokens - 1];  // decays only add up
    const bool has_far = __syncthreads_or(range.x > kFarRow || range.y > kFarRow) != 0;
    if (segment == 0) {
      *reinterpret_cast<float2*>(record + Record<K>::kDecay + column * 4) = exp2_pair(decay.end);
    }
    if (first < kBlock) {
      write_tiles<Io, K, true>(shared, record, G, decay, first, column);
    } else {
      write_tiles<Io, K, false>(shared, record, G, decay, first, column);
    }
    __syncthreads();
    compute_scores(shared);
    if (has_far) {
      sum_own_gates();  // once more: kept until here, they would not fit into the registers
      add_segments(shared, G, segment, column);
#pragma unroll
      for (int t = 0; t < Traits::kTokens; ++t) put_pair(&shared.G()[first + t][column], G[t]);
      __syncthreads();
      const auto rows_of = [&](const Tensor& t) {
        return static_cast<const Io*>(t.data) + token_offset(t, chunk.batch, chunk.begin, head);
      };
      replace_far_rows(shared, rows_of(p.q), p.q.stride[1], rows_of(p.k), p.k.stride[1],
                       chunk.rows);
    }
    __syncthreads();
    if (tid < 32) {
      write_solve(shared, record, p.split_beta);
    } else {
      write_scores(shared, record);
    }
    if (p.ready) {
      __syncthreads();
      if (tid == 0)
        asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(p.ready + index) : "memory");
    }
  }
}

}  // namespace kda::cuda::sm90
