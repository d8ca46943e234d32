// The serial scan over chunks of 64 tokens, (4.13)-(4.15), on wgmma and TMA.
//
// Grid: one block (or one of a cluster's blocks) a sequence, value head and v_tile columns of V,
// which need no communication; columns fastest, so that blocks of a head share w and kg in L2.
//
// Warps: v_tile / 64 consumer warpgroups, then the load warp (one lane starts TMA copies) and the
// decay warp. A consumer keeps S^T [64 v x K k] in fp32 accumulators. Per chunk:
//   h^T = S^T packed to 16 bits      -> staging -> TMA store                            (4.13)
//   v_new^T = u^T - h^T w^T            wgmma, A from registers, w summed over its columns (4.14)
//   S^T = 2^gamma . S^T + v_new^T kg   wgmma, A from registers, kg summed over its rows   (4.15)
// The second product starts from registers that the first one's epilogue packed: nothing of the
// recurrence passes through shared memory.
//
// Shared memory, bytes, K = 128:    v_tile 128, 3 stages      v_tile 64, 4 stages
//   stage: w                           16384                     16384
//          kg                          16384                     16384
//          u                           16384                      8192
//   staging of h                       32768                     16384
//   staging of v_new                   16384                      8192
//   decay, a row of K a stage           1536                      2048
//   barriers                              48                        64
//   sum                               198192 + padding          190528 + padding
//
// Barriers, each per stage:
//   full    2 arrivals + bytes: the load lane arms it and TMA completes it, the decay warp arrives;
//           consumers wait.
//   empty   one arrival a consumer warp of each block of the cluster; load and decay warp wait.
// Named barriers: 1 + g within consumer warpgroup g (staging), kTailBarrier among all consumers.
#pragma once

#include <cuda/ptx>

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/setmaxnreg.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/state_scan/state_scan.h"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/swizzle.cuh"

namespace kda::cuda::sm90 {

namespace ptx = ::cuda::ptx;

inline constexpr int kTailBarrier = 7;

template <class T16, class S>
struct alignas(1024) ScanShared {
  static constexpr int kPanel = kScanChunk * kPanelColumns;
  struct Stage {
    T16 w[kScanChunk * S::K];
    T16 kg[kScanChunk * S::K];
    T16 u[kScanChunk * S::v_tile];
  };
  Stage stages[S::stages];
  T16 h[kScanWarpgroups<S>][S::K * kWarpgroupColumns];
  T16 v_new[kScanWarpgroups<S>][kScanChunk * kWarpgroupColumns];
  float decay[S::stages][S::K];
  uint64_t full[S::stages];
  uint64_t empty[S::stages];
};

/// The part of the problem a block works on at a time.
struct ScanWork {
  TokenRange range;
  int64_t sequence;
  int64_t hv;
  int64_t v0;
};

template <class S>
__device__ __forceinline__ int64_t scan_works(const ScanParams& p) {
  return p.sequences.count * p.heads.HV * (p.heads.V / S::v_tile);
}

template <class S>
__device__ __forceinline__ ScanWork scan_work(const ScanParams& p, int64_t index) {
  const int64_t v_tiles = p.heads.V / S::v_tile;
  ScanWork work;
  work.v0 = index % v_tiles * S::v_tile;
  work.hv = index / v_tiles % p.heads.HV;
  work.sequence = index / v_tiles / p.heads.HV;
  work.range = chunks_of(p.sequences, work.sequence);
  return work;
}

/// Rows of chunk c that belong to the sequence. A tensor map ends rows that are not packed: they
/// are read as zeros and not written, so that they count as valid.
__device__ __forceinline__ int valid_rows(const ScanParams& p, const ScanWork& work, int64_t c) {
  if (!p.sequences.cu.data) return kScanChunk;
  const int64_t rest = work.range.end - work.range.begin - c * kScanChunk;
  return static_cast<int>(rest < kScanChunk ? rest : kScanChunk);
}

template <class S>
__device__ __forceinline__ void load_panel(void* to, const CUtensorMap& map, int column,
                                           const ScanWork& work, int64_t c, uint64_t* full,
                                           bool shared) {
  const int32_t at[4] = {column, static_cast<int32_t>(work.hv),
                         static_cast<int32_t>(work.range.begin + c * kScanChunk),
                         static_cast<int32_t>(work.range.batch)};
  if (S::cluster > 1 && shared) {
    ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, to, &map, at, full,
                              static_cast<uint16_t>((1 << S::cluster) - 1));
  } else {
    ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, to, &map, at, full);
  }
}

/// The load warp's lane. Blocks of a cluster take the panels of w and kg in turns.
template <class T16, class S>
__device__ void load_tiles(ScanShared<T16, S>& shared, const ScanParams& p) {
  constexpr int kPanels = S::K / kPanelColumns;
  constexpr int kPanel = ScanShared<T16, S>::kPanel;
  const int rank = S::cluster > 1 ? static_cast<int>(ptx::get_sreg_cluster_ctarank()) : 0;
  RingPosition<S::stages> at;
  for (int64_t index = blockIdx.x; index < scan_works<S>(p); index += gridDim.x) {
    const ScanWork work = scan_work<S>(p, index);
    for (int64_t c = 0; c < work.range.chunks; ++c, at.advance()) {
      wait_for(&shared.empty[at.stage], at.parity ^ 1);
      uint64_t* const full = &shared.full[at.stage];
      auto& stage = shared.stages[at.stage];
      ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, full,
                                     static_cast<uint32_t>(sizeof(stage)));
      for (int panel = 0; panel < 2 * kPanels; ++panel) {
        if (panel % S::cluster != rank) continue;
        const bool is_w = panel < kPanels;
        const int i = panel % kPanels;
        load_panel<S>((is_w ? stage.w : stage.kg) + i * kPanel, is_w ? p.w : p.kg,
                      i * kPanelColumns, work, c, full, true);
      }
      for (int i = 0; i < kScanWarpgroups<S>; ++i) {
        load_panel<S>(stage.u + i * kPanel, p.u, static_cast<int>(work.v0) + i * kPanelColumns,
                      work, c, full, false);
      }
    }
  }
}

template <int Width>
struct DecayRow {
  float value[Width];
};

/// 2^gamma of the last valid row of each chunk, K / 32 channels a lane.
template <class T16, class S>
__device__ void load_decay(ScanShared<T16, S>& shared, const ScanParams& p, int lane) {
  constexpr int kWidth = S::K / 32;
  RingPosition<S::stages> at;
  for (int64_t index = blockIdx.x; index < scan_works<S>(p); index += gridDim.x) {
    const ScanWork work = scan_work<S>(p, index);
    const float* const gamma = static_cast<const float*>(p.gamma.data) +
                               token_offset(p.gamma, work.range.batch, 0, work.hv) + kWidth * lane;
    // One chunk ahead, so that the latency of memory is not that of a chunk.
    const auto fetch = [&](int64_t c) {
      DecayRow<kWidth> row;
      const int64_t next = work.range.begin + (c + 1) * kScanChunk;
      const int64_t last = (next < work.range.end ? next : work.range.end) - 1;
      const float* const from = gamma + last * p.gamma.stride[1];
      for (int i = 0; i < kWidth; i += 2) {
        const float2 pair = __ldg(reinterpret_cast<const float2*>(from + i));
        row.value[i] = pair.x;
        row.value[i + 1] = pair.y;
      }
      return row;
    };
    DecayRow<kWidth> row{};
    if (work.range.chunks > 0) row = fetch(0);
    for (int64_t c = 0; c < work.range.chunks; ++c, at.advance()) {
      const DecayRow<kWidth> next = c + 1 < work.range.chunks ? fetch(c + 1) : row;
      wait_for(&shared.empty[at.stage], at.parity ^ 1);
      for (int i = 0; i < kWidth; ++i) {
        shared.decay[at.stage][kWidth * lane + i] = exp2f(row.value[i]);
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(&shared.full[at.stage]);
      row = next;
    }
  }
}

/// A consumer warpgroup's view of the block.
template <class T16, class S>
struct ScanConsumer {
  static constexpr int kState = S::K / 2;  ///< accumulator registers of S^T
  using Shared = ScanShared<T16, S>;

  Shared& shared;
  const ScanParams& p;
  int group;  ///< warpgroup
  int lane;
  FragmentLane at;
  TransposedLane lines;
  bool leader;  ///< the thread that starts the stores

  __device__ ScanConsumer(Shared& memory, const ScanParams& params, int warp, int lane_index)
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

  /// (4.13). Until the staging of h is free, then out with it.
  __device__ __forceinline__ void stage_h(const uint32_t (&h)[kState / 2]) const {
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared.h[group]));
    if (leader) {
      // The store of h is older than that of v_new.
      if (p.v_new_rows.data) {
        ptx::cp_async_bulk_wait_group_read(ptx::n32_t<1>{});
      } else {
        ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>{});
      }
    }
    sync();
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
    constexpr int kThreads = kScanWarpgroups<S> * kWarpgroupThreads;
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

  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    if constexpr (S::cluster == 1) {
      if (lane == 0) ptx::mbarrier_arrive(&shared.empty[stage]);
    } else if (lane < S::cluster) {
      ptx::mbarrier_arrive(
          ptx::sem_release, ptx::scope_cluster, ptx::space_cluster,
          static_cast<uint64_t*>(__cluster_map_shared_rank(&shared.empty[stage], lane)));
    }
  }

  __device__ __forceinline__ void chunk(float (&state)[kState], const ScanWork& work, int64_t c,
                                        const RingPosition<S::stages>& position) const {
    const int rows = valid_rows(p, work, c);
    auto& stage = shared.stages[position.stage];
    uint32_t h[kState / 2];
#pragma unroll
    for (int i = 0; i < kState / 2; ++i) h[i] = pack<T16>(state[2 * i], state[2 * i + 1]);
    wait_for(&shared.full[position.stage], position.parity);

    float product[32];
    const PanelTile<kScanChunk> w{static_cast<uint32_t>(__cvta_generic_to_shared(stage.w))};
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < S::K / 16; ++step) {
      wgmma_rs<T16, Major::kSummed>(product, h + 4 * step, w.columns(step), step > 0);
    }
    wgmma_commit();

    // Under the product: h leaves, u and the decay come.
    wgmma_wait<1>();
    if (p.has_h) stage_h(h);
    uint32_t v_new[16];
    const uint32_t u =
        static_cast<uint32_t>(__cvta_generic_to_shared(stage.u + group * Shared::kPanel));
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      ldmatrix_transposed(v_new + 4 * step, u + lines.offset(step));
    }
    publish_to_async_proxy();
    if (leader) ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>{});  // v_new's staging is free
    sync();
    if (leader && p.has_h) store_h(work, c);
#pragma unroll
    for (int i = 0; i < kState / 4; ++i) {
      const float2 decay =
          *reinterpret_cast<const float2*>(&shared.decay[position.stage][8 * i + at.column]);
      state[4 * i] *= decay.x;
      state[4 * i + 1] *= decay.y;
      state[4 * i + 2] *= decay.x;
      state[4 * i + 3] *= decay.y;
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 value = unpack<T16>(v_new[i]);
      v_new[i] = pack<T16>(value.x - product[2 * i], value.y - product[2 * i + 1]);
    }
    if (rows < kScanChunk) clear_tail(v_new, stage.kg, rows);

    const PanelTile<kScanChunk> kg{static_cast<uint32_t>(__cvta_generic_to_shared(stage.kg))};
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kScanChunk / 16; ++step) {
      wgmma_rs<T16, Major::kOuter>(state, v_new + 4 * step, kg.rows(step), true);
    }
    wgmma_commit();
    if (p.v_new_rows.data) {
      const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared.v_new[group]));
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        stmatrix_transposed(to + lines.offset(step), v_new + 4 * step);
      }
      publish_to_async_proxy();
      sync();
      store_v_new(work, c, rows);
    }
    wgmma_wait<0>();
    release(position.stage);
  }

  __device__ void run() const {
    RingPosition<S::stages> position;
    for (int64_t index = blockIdx.x; index < scan_works<S>(p); index += gridDim.x) {
      const ScanWork work = scan_work<S>(p, index);
      float state[kState];
      load_state(state, work);
      for (int64_t c = 0; c < work.range.chunks; ++c, position.advance()) {
        chunk(state, work, c, position);
      }
      store_state(state, work);
    }
    if (leader) ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>{});
  }
};

template <class T16, class S>
__global__ void __cluster_dims__(S::cluster, 1, 1) __launch_bounds__(kScanThreads<S>, 1)
    sm90_state_scan(const __grid_constant__ ScanParams p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<ScanShared<T16, S>*>(memory);
  constexpr int kConsumerWarps = 4 * kScanWarpgroups<S>;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::stages; ++i) {
      ptx::mbarrier_init(&shared.full[i], 2);
      ptx::mbarrier_init(&shared.empty[i], kConsumerWarps * S::cluster);
    }
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
  }
  if constexpr (S::cluster > 1) {
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
  } else {
    __syncthreads();
  }
  if (warp < kConsumerWarps) {
    if constexpr (kScanWarpgroups < S >> 1) claim_registers<kConsumerRegisters>();
    ScanConsumer<T16, S>(shared, p, warp, lane).run();
  } else {
    if constexpr (kScanWarpgroups < S >> 1) release_registers<kProducerRegisters>();
    if (warp == kConsumerWarps) {
      if (lane == 0) load_tiles<T16, S>(shared, p);
    } else if (warp == kConsumerWarps + 1) {
      load_decay<T16, S>(shared, p, lane);
    }
  }
  if constexpr (S::cluster > 1) {  // nobody leaves while the others still write or arrive here
    __syncwarp();
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
  }
}

}  // namespace kda::cuda::sm90
