// The dq warpgroup of sm90_state_scan: dq_raw = do h^T (5.1) from the tile of do and the staging of
// h, where TMA finds it too.
//
// A block holds v_tile columns of V, and dq_raw sums over all. Two blocks of a cluster exchange
// halves: the block of rank r finishes the channels of half r, for which the other one writes its
// partial sums into this block's shared memory. Both orders of two addends give the same bits.
// Where V is more than a block or cluster holds, each stores its sums as a part of its own, which
// raw_dq_sum.cu adds in the order of the columns.
#pragma once

#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/state_scan/shared.cuh"

namespace kda::cuda::sm90 {

template <class T16, class S>
struct RawDqConsumer {
  /// Accumulator registers of dq [64 t x K / 2 k]: half the channels.
  static constexpr int kSums = S::K / 4;

  ScanShared<T16, S>& shared;
  const ScanParams& p;
  int lane;
  int thread;  ///< in the warpgroup
  FragmentLane at;
  int rank;

  __device__ RawDqConsumer(ScanShared<T16, S>& memory, const ScanParams& params, int warp,
                           int lane_index)
      : shared(memory),
        p(params),
        lane(lane_index),
        thread(warp % 4 * 32 + lane_index),
        at(warp % 4, lane_index),
        rank(S::cluster > 1 ? static_cast<int>(ptx::get_sreg_cluster_ctarank()) : 0) {}

  __device__ __forceinline__ void store(const float (&sums)[kSums], const ScanWork& work, int64_t c,
                                        int half) const {
    const int rows = rows_of(work, c);
    float* const to =
        static_cast<float*>(p.dq_raw.data) + work.v0 / (S::v_tile * S::cluster) * p.dq_part +
        token_offset(p.dq_raw, work.range.batch, work.range.begin + c * kScanChunk, work.hv) +
        half * (S::K / 2) + at.column;
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      const int row = at.row + 8 * below;
      if (row >= rows) continue;
      float* const line = to + row * p.dq_raw.stride[1];
#pragma unroll
      for (int i = 0; i < kSums / 4; ++i) {
        *reinterpret_cast<float2*>(line + 8 * i) =
            float2{sums[4 * i + 2 * below], sums[4 * i + 2 * below + 1]};
      }
    }
  }

  /// Gives the other block the sums `theirs` and adds what it gave to `mine`.
  __device__ __forceinline__ void exchange(float (&mine)[kSums], const float (&theirs)[kSums],
                                           uint32_t parity) const {
    const unsigned peer = static_cast<unsigned>(rank ^ 1);
    wait_for_cluster(&shared.dq.landing_free, parity ^ 1);
    auto* const to =
        static_cast<float4*>(__cluster_map_shared_rank(shared.dq.landing, peer)) + thread;
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      to[i / 4 * kWarpgroupThreads] =
          float4{theirs[i], theirs[i + 1], theirs[i + 2], theirs[i + 3]};
    }
    arrive_at_peer(&shared.dq.landing_full, peer);
    wait_for_cluster(&shared.dq.landing_full, parity);
    const auto* const from = reinterpret_cast<const float4*>(shared.dq.landing) + thread;
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      const float4 part = from[i / 4 * kWarpgroupThreads];
      mine[i] += part.x;
      mine[i + 1] += part.y;
      mine[i + 2] += part.z;
      mine[i + 3] += part.w;
    }
    arrive_at_peer(&shared.dq.landing_free, peer);
  }

  __device__ __forceinline__ void wait_for_cluster(uint64_t* barrier, uint32_t parity) const {
    while (!ptx::mbarrier_try_wait_parity(ptx::sem_acquire, ptx::scope_cluster, barrier, parity)) {
    }
  }

  __device__ __forceinline__ void arrive_at_peer(uint64_t* barrier, unsigned peer) const {
    ptx::mbarrier_arrive(ptx::sem_release, ptx::scope_cluster, ptx::space_cluster,
                         static_cast<uint64_t*>(__cluster_map_shared_rank(barrier, peer)));
  }

  /// The channels of half `rank` and those of the other half.
  __device__ __forceinline__ void multiply(float (&mine)[kSums], float (&theirs)[kSums],
                                           int stage) const {
    constexpr uint32_t kHalfBytes = S::K / 2 * kPanelRowBytes;
    wgmma_fence();
#pragma unroll
    for (int group = 0; group < S::groups; ++group) {
      const PanelTile<kScanChunk> grad_o{
          shared_address(shared.stages[stage].grad_o + group * kTokenPanel)};
      const uint32_t h = shared_address(shared.h[group]);
      const PanelTile<S::K> first{h + static_cast<uint32_t>(rank) * kHalfBytes};
      const PanelTile<S::K> second{h + static_cast<uint32_t>(rank ^ 1) * kHalfBytes};
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        wgmma_ss<T16, Major::kSummed, Major::kSummed>(mine, grad_o.columns(step),
                                                      first.columns(step), group + step > 0);
        wgmma_ss<T16, Major::kSummed, Major::kSummed>(theirs, grad_o.columns(step),
                                                      second.columns(step), group + step > 0);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
  }

  __device__ void run() const {
    RingPosition<S::stages> position;
    uint32_t parity = 0;  // of the chunks done
    for (int64_t index = blockIdx.x; index < scan_works<S>(p); index += gridDim.x) {
      const ScanWork work = scan_work<S>(p, index);
      for (int64_t c = 0; c < work.range.chunks; ++c, position.advance(), parity ^= 1) {
        wait_for(&shared.full[position.stage], position.parity);
        wait_for(&shared.dq.h_full, parity);
        float mine[kSums];
        float theirs[kSums];
        multiply(mine, theirs, position.stage);
        __syncwarp();
        if (lane == 0) {
          ptx::mbarrier_arrive(&shared.dq.h_read);
          ptx::mbarrier_arrive(&shared.empty[position.stage]);
        }
        if constexpr (S::cluster > 1) {
          exchange(mine, theirs, parity);
        } else {
          store(theirs, work, c, 1);
        }
        store(mine, work, c, rank);
      }
    }
  }
};

}  // namespace kda::cuda::sm90
