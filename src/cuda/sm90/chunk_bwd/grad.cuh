// grad: one chunk of 32 tokens and one value head; h and dh around it, v_new and R of it and the
// raw inputs -> dq, dk, dv, dg, dbeta and the chunk's part of dA_log and ddt_bias.
//
// Grid: one block of K / 64 warpgroups for each (chunk, value head), heads fastest. A warpgroup
// owns 64 channels; two blocks (K = 64: three) share an SM, so that one computes while the other
// loads.
//
// Accumulators are transposed, [64 channels x 32 tokens]. With h, dh as A operands, in tiles of 64
// columns of V:
//   [dqe | Y]^T = h [do; R]^T, dkx^T = dh v_new^T        wgmma m64n64, m64n32
//   [dP; dL] = [do; R] v_new^T                           the first warpgroup, m64n32
//   rowsum_V(h . dh), rowsum_V(R . v), dv = beta R       CUDA cores, under the products
// then the intra part (grad_intra.cuh) with bf16 operands of 48 and 64 rows, and everything of
// (5.32), (5.33) in the accumulators' layout (grad_finish.cuh), at last the gates (grad_gates.cuh).
//
// Shared memory, bytes, K = 128:
//   tiles of h, dh, [do; R], v_new   45056   later operands of the intra part, then staging
//   [dP; dL] arranged                 8192
//   G, fp32                          16896
//   q, k                             17408
//   sums                              7424
//
// Barriers: __syncthreads between the phases.
#pragma once

#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/chunk_bwd/grad_finish.cuh"

namespace kda::cuda::sm90 {

namespace ptx = ::cuda::ptx;

template <int K>
struct GradBlock {
  using Traits = GradTraits<K>;
  static constexpr int kValueRows = kChunk * 8 / Traits::kThreads;  ///< of a thread

  GradShared<K>& shared;
  const GradParams& p;
  const GradWork& work;
  int tid;
  int warp;
  int lane;

  /// Copies have landed everywhere, visible to wgmma.
  static __device__ __forceinline__ void wait_for_tiles() {
    wait_for_copies<0>();
    ptx::fence_proxy_async(ptx::space_shared);
    __syncthreads();
  }

  __device__ __forceinline__ void issue_value_products(float (&S)[32], float (&dkx)[16],
                                                       float (&scores)[16], bool add) const {
    const int group = warp / 4;
    const uint32_t half = static_cast<uint32_t>(group) * 64 * kPanelRowBytes;
    const PanelTile<K> h{shared_address(shared.value.h) + half};
    const PanelTile<K> dh{shared_address(shared.value.dh) + half};
    const PanelTile<2 * kChunk> do_R{shared_address(shared.value.do_R)};
    const PanelTile<kChunk> v_new{shared_address(shared.value.v_new)};
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kGradColumns / 16; ++step) {
      wgmma_ss<Bf16, Major::kSummed, Major::kSummed>(S, h.columns(step), do_R.columns(step),
                                                     add || step > 0);
    }
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kGradColumns / 16; ++step) {
      wgmma_ss<Bf16, Major::kSummed, Major::kSummed>(dkx, dh.columns(step), v_new.columns(step),
                                                     add || step > 0);
    }
    // Every warpgroup, though the first one's would do: a branch here would split the group.
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kGradColumns / 16; ++step) {
      wgmma_ss<Bf16, Major::kSummed, Major::kSummed>(scores, do_R.columns(step),
                                                     v_new.columns(step), add || step > 0);
    }
    wgmma_commit();
  }

  /// All products over V. q, k and the first tiles are on their way.
  __device__ __forceinline__ void walk_values(float (&S)[32], float (&dkx)[16],
                                              float (&scores)[16]) const {
    float state_product = 0;
    float value_product[kValueRows] = {};
    const int V = static_cast<int>(p.heads.V);
#pragma unroll 1
    for (int v0 = 0; v0 < V; v0 += kGradColumns) {
      asm volatile("" : "+r"(v0));  // addresses are formed here, not kept across the products
      if (v0 > 0) {
        __syncthreads();
        load_value_tiles(shared, p, work, v0);
        commit_copies();
      }
      wait_for_tiles();
      issue_value_products(S, dkx, scores, v0 > 0);
      state_product = multiply_states(shared, state_product);
      finish_values(shared, p, work, v0, value_product);
      wgmma_wait<0>();
    }
    shared.state_product[tid / K][tid % K] = state_product;
#pragma unroll
    for (int i = 0; i < kValueRows; ++i) {
      float sum = value_product[i];
      for (int step = 4; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (tid % 8 == 0) shared.value_product[tid / 8 + i * (kChunk / kValueRows)] = sum;
    }
  }

  /// S += [dq2 | z]^T, all but the rows' factor.
  __device__ __forceinline__ void multiply_rows(float (&S)[32]) const {
    const PanelTile<kArranged> columns{shared_address(shared.intra.columns[warp / 4])};
    const PanelTile<2 * kChunk> scores{shared_address(shared.scores)};
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kArranged / 16; ++step) {
      wgmma_ss<Bf16, Major::kOuter, Major::kSummed>(S, columns.rows(step), scores.columns(step),
                                                    true);
    }
    wgmma_commit();
    wgmma_wait<0>();
  }

  /// dkc^T before the columns' factors, arranged.
  __device__ __forceinline__ void multiply_columns(float (&x)[24]) const {
    const PanelTile<2 * kChunk> rows{shared_address(shared.intra.rows[warp / 4])};
    const PanelTile<2 * kChunk> scores{shared_address(shared.scores)};
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 2 * kChunk / 16; ++step) {
      wgmma_ss<Bf16, Major::kOuter, Major::kOuter>(x, rows.rows(step), scores.rows(step), step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
  }

  __device__ __forceinline__ void run() const {
    const int column = tid % Traits::kPairs * 2;
    const int segment = tid / Traits::kPairs;
    load_qk(shared, p, work);
    commit_copies();
    load_value_tiles(shared, p, work, 0);
    commit_copies();
    {
      constexpr int kTokens = Traits::kTokens;
      float2 G[kTokens];
      load_gates(G, p.gate.g, work.chunk, work.hv, segment * kTokens, column);
      sum_gates(G, p.gate, work.hv, work.chunk.rows - segment * kTokens, column);
      put_pair(&shared.totals[segment][column], G[kTokens - 1]);
      wait_for_copies<1>();
      __syncthreads();
      load_tokens(shared, p, work);
      put_gates(shared, G, segment, column);
    }
    float S[32];
    float dkx[16];
    {
      float scores[16];
      walk_values(S, dkx, scores);
      if (warp < 4) put_scores_gradient(shared, scores, p.scale, p.mantissa, warp, lane);
    }
    __syncthreads();
    const bool far = put_intra_tiles(shared, segment, column);
    ptx::fence_proxy_async(ptx::space_shared);
    const bool has_far = __syncthreads_or(far) != 0;
    GradFinish<K> finish(shared, p, work, warp, lane);
    finish.scale_rows(S);
    multiply_rows(S);
    float x[24];
    multiply_columns(x);
    float W[16];
    finish.combine_all(S, dkx, x, W, has_far);
    __syncthreads();
    int place = lane;
    asm volatile("" : "+r"(place));  // addresses are formed again, not kept across combine_all
    GradFinish<K>(shared, p, work, warp, place).store_all(S, dkx, W);
  }
};

template <int K>
__global__ void __launch_bounds__(GradTraits<K>::kThreads, GradTraits<K>::kBlocksPerSm)
    sm90_chunk_bwd_grad(const __grid_constant__ GradParams p) {
  extern __shared__ __align__(1024) unsigned char dynamic[];
  auto& shared = *reinterpret_cast<GradShared<K>*>(dynamic);
  const auto HV = static_cast<uint32_t>(p.heads.HV);
  GradWork work;
  work.row = blockIdx.x / HV;
  work.hv = blockIdx.x % HV;
  work.head = work.hv / static_cast<uint32_t>(p.heads.group);
  work.chunk = small_chunk_of(p.sequences, blockIdx.x / HV);
  if (work.chunk.rows == 0) return clear_partial(p, work.row, work.hv);
  const int tid = static_cast<int>(threadIdx.x);
  const int warp = __shfl_sync(~0u, tid / 32, 0);
  GradBlock<K>{shared, p, work, tid, warp, tid % 32}.run();
}

}  // namespace kda::cuda::sm90
