// The serial scan over chunks of 64 tokens, (4.13)-(4.15), on wgmma and TMA.
//
// Grid: one block a sequence, value head and v_tile columns of V, which need no communication but
// for dq_raw; columns fastest, so that blocks of a head share w and kg in L2.
//
// Warps: v_tile / 64 state warpgroups; with dq_raw one dq warpgroup (raw_dq.cuh); the load warp, of
// which one lane starts TMA copies, and the decay warp (producer.cuh). A state warpgroup keeps
// S^T [64 v x K k] in fp32 accumulators. Per chunk:
//   h^T = S^T packed to 16 bits      -> staging -> TMA store                              (4.13)
//   v_new^T = u^T - h^T w^T            wgmma, A from registers, w summed over its columns (4.14)
//   S^T = 2^gamma . S^T + v_new^T kg   wgmma, A from registers, kg summed over its rows   (4.15)
// The second product starts from registers that the first one's epilogue packed: nothing of the
// recurrence passes through shared memory.
//
// Shared memory, bytes, K = 128:   narrow     wide   narrow, dq   wide, dq   wide, dq, cluster
//   stages                              3        2            3          2                   2
//   a stage: w, kg                  32768    32768        32768      32768               32768
//            u                       8192    16384         8192      16384               16384
//            do                                            8192      16384               16384
//   staging of h                    16384    32768        16384      32768               32768
//   staging of v_new                 8192    16384         8192      16384               16384
//   decay, 512 a stage               1536     1024         1536       1024                1024
//   landing of partial dq                                    16         16               16384
//   barriers                           48       32           80         64                  64
//   sum, rounded up to 1024        149504   149504       174080     182272              198656
//
// Barriers (mbarriers, the first two per stage):
//   full     33 arrivals + bytes: the load lane arms it and TMA completes it, the lanes of the
//            decay warp arrive; state and dq warpgroups wait.
//   empty    every state thread and one lane a dq warp arrive; load and decay warp wait.
//   h_full, h_read       dq_raw: h is in the staging (state -> dq), and was read (dq -> state).
//   landing_full, _free  dq_raw in a cluster: the other block's dq threads arrive.
// Named barriers: 1 + g within state warpgroup g (staging), kTailBarrier among all of them.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/setmaxnreg.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/state_scan/producer.cuh"
#include "cuda/sm90/state_scan/raw_dq.cuh"
#include "cuda/sm90/state_scan/shared.cuh"

namespace kda::cuda::sm90 {

inline constexpr int kTailBarrier = 7;

/// A state warpgroup's view of the block.
template <class T16, class S>
struct StateConsumer {
  static constexpr int kState = S::K / 2;  ///< accumulator registers of S^T

  ScanShared<T16, S>& shared;
  const ScanParams& p;
  int group;  ///< warpgroup
  int lane;
  FragmentLane at;
  TransposedLane lines;
  bool leader;  ///< the thread that starts the stores

  __device__ StateConsumer(ScanShared<T16, S>& memory, const ScanParams& params, int warp,
                           int lane_index)
      : shared(memory),
        p(params),
        group(warp / 4),
        lane(lane_index),
        at(warp % 4, lane_index),
        lines(warp % 4, lane_index),
        leader(warp % 4 == 0 && lane_index == 0) {}

  __device__ __forceinline__ void sync() const { barrier_sync(1 + group, kWarpgroupThreads); }

  /// f(register, offset in the tensor) for every element of S^T this thread holds.
  template <class F>
  __device__ __forceinline__ void each_element(const Tensor& t, const ScanWork& work, F f) const {
    const int64_t base = work.sequence * t.stride[0] + work.hv * t.stride[1] +
                         (work.v0 + group * kWarpgroupColumns + at.row) * t.stride[3] +
                         at.column * t.stride[2];
#pragma unroll
    for (int i = 0; i < kState; ++i) {
      const int k = i / 4 * 8 + i % 2;
      f(i, base + k * t.stride[2] + i / 2 % 2 * 8 * t.stride[3]);
    }
  }

  __device__ void load_state(float (&state)[kState], const ScanWork& work) const {
    const auto* const from = static_cast<const float*>(p.initial_state.data);
    each_element(p.initial_state, work,
                 [&](int i, int64_t offset) { state[i] = from ? from[offset] : 0.f; });
  }

  __device__ void store_state(const float (&state)[kState], const ScanWork& work) const {
    auto* const to = static_cast<float*>(p.final_state.data);
    if (to)
      each_element(p.final_state, work, [&](int i, int64_t offset) { to[offset] = state[i]; });
  }

  /// (4.13), once the staging of h is free.
  __device__ __forceinline__ void stage_h(const uint32_t (&h)[kState / 2], uint32_t parity) const {
    if (leader) {
      // The last store of h is older than that of v_new.
      if (p.v_new_rows.data) {
        ptx::cp_async_bulk_wait_group_read(ptx::n32_t<1>{});
      } else {
        ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>{});
      }
      if constexpr (S::raw_dq) wait_for(&shared.dq.h_read, parity ^ 1);
    }
    sync();
    const uint32_t to = shared_address(shared.h[group]);
#pragma unroll
    for (int step = 0; step < S::K / 16; ++step) {
      stmatrix_transposed(to + lines.offset(step), h + 4 * step);
    }
  }

  __device__ __forceinline__ void store_h(const ScanWork& work, int64_t c) const {
    const int32_t to[4] = {static_cast<int32_t>(work.v0) + group * kWarpgroupColumns, 0,
                           static_cast<int32_t>(work.hv),
                           static_cast<int32_t>(work.range.first_chunk + c)};
    ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &p.h, to, shared.h[group]);
    ptx::cp_async_bulk_commit_group();
  }

  __device__ __forceinline__ void store_v_new(const ScanWork& work, int64_t c, int rows) const {
    const int64_t token = work.range.begin + c * kScanChunk;
    const int64_t v = work.v0 + group * kWarpgroupColumns;
    if (rows == kScanChunk) {
      if (!leader) return;
      const int32_t to[4] = {static_cast<int32_t>(v), static_cast<int32_t>(work.hv),
                             static_cast<int32_t>(token), static_cast<int32_t>(work.range.batch)};
      ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &p.v_new, to,
                                shared.v_new[group]);
      ptx::cp_async_bulk_commit_group();
      return;
    }
    // The rows behind belong to the next sequence.
    T16* const to = static_cast<T16*>(p.v_new_rows.data) +
                    token_offset(p.v_new_rows, work.range.batch, token, work.hv) + v;
    const char* const from = reinterpret_cast<const char*>(shared.v_new[group]);
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads;
    for (int e = thread; e < rows * 8; e += kWarpgroupThreads) {
      *reinterpret_cast<uint4*>(to + e / 8 * p.v_new_rows.stride[1] + e % 8 * kUnitElements) =
          *reinterpret_cast<const uint4*>(from + unit_offset(e / 8, e % 8));
    }
  }

  /// Rows that are not the sequence's may hold anything: those of v_new and of kg become 0.
  __device__ void clear_tail(uint32_t (&v_new)[16], T16* kg, int rows) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int token = i / 2 * 8 + at.column;
      const uint32_t low = token < rows ? v_new[i] & 0xffffu : 0u;
      const uint32_t high = token + 1 < rows ? v_new[i] & 0xffff0000u : 0u;
      v_new[i] = low | high;
    }
    constexpr int kThreads = S::groups * kWarpgroupThreads;
    char* const tile = reinterpret_cast<char*>(kg);
    const int units = (kScanChunk - rows) * 8;
    for (int panel = 0; panel < S::K / kPanelColumns; ++panel) {
      for (int e = static_cast<int>(threadIdx.x); e < units; e += kThreads) {
        *reinterpret_cast<uint4*>(tile + panel * kScanChunk * kPanelRowBytes +
                                  unit_offset(rows + e / 8, e % 8)) = uint4{};
      }
    }
    publish_to_async_proxy();
    barrier_sync(kTailBarrier, kThreads);
  }

  /// Starts h^T w^T.
  __device__ __forceinline__ void multiply_w(float (&product)[32], const uint32_t (&h)[kState / 2],
                                             const T16* tile) const {
    const PanelTile<kScanChunk> w{shared_address(tile)};
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < S::K / 16; ++step) {
      wgmma_rs<T16, Major::kSummed>(product, h + 4 * step, w.columns(step), step > 0);
    }
    wgmma_commit();
  }

  /// (4.15): S^T = 2^gamma . S^T, to which multiply_kg adds.
  __device__ __forceinline__ void decay_state(float (&state)[kState], const float* decay) const {
#pragma unroll
    for (int i = 0; i < kState / 4; ++i) {
      const float2 factor = *reinterpret_cast<const float2*>(decay + 8 * i + at.column);
      state[4 * i] *= factor.x;
      state[4 * i + 1] *= factor.y;
      state[4 * i + 2] *= factor.x;
      state[4 * i + 3] *= factor.y;
    }
  }

  /// Starts S^T += v_new^T kg.
  __device__ __forceinline__ void multiply_kg(float (&state)[kState], const uint32_t (&v_new)[16],
                                              const T16* tile) const {
    const PanelTile<kScanChunk> kg{shared_address(tile)};
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kScanChunk / 16; ++step) {
      wgmma_rs<T16, Major::kOuter>(state, v_new + 4 * step, kg.rows(step), true);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void stage_v_new(const uint32_t (&v_new)[16]) const {
    const uint32_t to = shared_address(shared.v_new[group]);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      stmatrix_transposed(to + lines.offset(step), v_new + 4 * step);
    }
    publish_to_async_proxy();
    sync();
  }

  __device__ __forceinline__ void chunk(float (&state)[kState], const ScanWork& work, int64_t c,
                                        const RingPosition<S::stages>& position,
                                        uint32_t parity) const {
    // The tensor map ends rows that are not packed: they are read as zeros and not written.
    const int rows = p.sequences.cu.data ? rows_of(work, c) : kScanChunk;
    auto& stage = shared.stages[position.stage];
    uint32_t h[kState / 2];
#pragma unroll
    for (int i = 0; i < kState / 2; ++i) h[i] = pack<T16>(state[2 * i], state[2 * i + 1]);
    wait_for(&shared.full[position.stage], position.parity);
    float product[32];
    multiply_w(product, h, stage.w);

    // Under the product h leaves, u comes and the state decays, whose registers the last group
    // wrote: ptxas wants to see that it has ended.
    wgmma_wait<1>();
    if (S::raw_dq || p.has_h) stage_h(h, parity);
    uint32_t v_new[16];
    const uint32_t u = shared_address(stage.u + group * kTokenPanel);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      ldmatrix_transposed(v_new + 4 * step, u + lines.offset(step));
    }
    publish_to_async_proxy();
    if (leader) ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>{});  // v_new's staging is free
    sync();
    if (leader) {
      if constexpr (S::raw_dq) ptx::mbarrier_arrive(&shared.dq.h_full);
      if (p.has_h) store_h(work, c);
    }
    decay_state(state, shared.decay[position.stage]);
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 16; ++i) {  // (4.14)
      const float2 value = unpack<T16>(v_new[i]);
      v_new[i] = pack<T16>(value.x - product[2 * i], value.y - product[2 * i + 1]);
    }
    if (rows < kScanChunk) clear_tail(v_new, stage.kg, rows);
    multiply_kg(state, v_new, stage.kg);
    if (p.v_new_rows.data) {
      stage_v_new(v_new);
      store_v_new(work, c, rows);
    }
    wgmma_wait<0>();
    ptx::mbarrier_arrive(&shared.empty[position.stage]);
  }

  __device__ void run() const {
    RingPosition<S::stages> position;
    uint32_t parity = 0;  // of the chunks done
    for (int64_t index = blockIdx.x; index < scan_works<S>(p); index += gridDim.x) {
      const ScanWork work = scan_work<S>(p, index);
      float state[kState];
      load_state(state, work);
      for (int64_t c = 0; c < work.range.chunks; ++c, position.advance(), parity ^= 1) {
        chunk(state, work, c, position, parity);
      }
      store_state(state, work);
    }
    if (leader) ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>{});
  }
};

template <class T16, class S>
__device__ void initialise_barriers(ScanShared<T16, S>& shared) {
  constexpr uint32_t kReaders = S::groups * kWarpgroupThreads + (S::raw_dq ? 4 : 0);
  for (int i = 0; i < S::stages; ++i) {
    ptx::mbarrier_init(&shared.full[i], 1 + 32);
    ptx::mbarrier_init(&shared.empty[i], kReaders);
  }
  if constexpr (S::raw_dq) {
    ptx::mbarrier_init(&shared.dq.h_full, S::groups);
    ptx::mbarrier_init(&shared.dq.h_read, 4);
    ptx::mbarrier_init(&shared.dq.landing_full, kWarpgroupThreads);
    ptx::mbarrier_init(&shared.dq.landing_free, kWarpgroupThreads);
  }
  ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
}

/// All threads of the block, or of the cluster.
template <class S>
__device__ __forceinline__ void sync_blocks() {
  if constexpr (S::cluster > 1) {
    __syncwarp();
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
  } else {
    __syncthreads();
  }
}

template <class T16, class S>
__global__ void __cluster_dims__(S::cluster, 1, 1) __launch_bounds__(kScanThreads<S>, 1)
    sm90_state_scan(const __grid_constant__ ScanParams p) {
  static_assert(kFitsHopper<T16, S>);
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<ScanShared<T16, S>*>(memory);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) initialise_barriers<T16, S>(shared);
  sync_blocks<S>();
  if (warp < 4 * S::groups) {
    if constexpr (kMovesRegisters<S>) claim_registers<kStateRegisters<S>>();
    StateConsumer<T16, S>(shared, p, warp, lane).run();
  } else if (warp < 4 * kScanConsumers<S>) {
    if constexpr (S::raw_dq) {
      release_registers<kRawDqRegisters>();  // fewer than any launch gives
      RawDqConsumer<T16, S>(shared, p, warp, lane).run();
    }
  } else {
    if constexpr (kMovesRegisters<S>) release_registers<kProducerRegisters>();
    if (warp == 4 * kScanConsumers<S>) {
      if (lane == 0) load_tiles<T16, S>(shared, p);
    } else if (warp == 4 * kScanConsumers<S> + 1) {
      load_decay<T16, S>(shared, p, lane);
    }
  }
  if constexpr (S::cluster > 1) sync_blocks<S>();  // the other block may still write or arrive here
}

}  // namespace kda::cuda::sm90
