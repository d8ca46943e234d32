// The producer warps of sm90_state_scan: tiles through TMA, and the decay of each chunk.
#pragma once

#include "cuda/sm90/state_scan/shared.cuh"

namespace kda::cuda::sm90 {

/// The panels of a tile, from column `column` of the tensor on.
template <int kPanels, class T16>
__device__ __forceinline__ void load_panels(T16* to, const CUtensorMap& map, int64_t column,
                                            const ScanWork& work, int64_t c, uint64_t* full) {
  for (int i = 0; i < kPanels; ++i) {
    const int32_t at[4] = {static_cast<int32_t>(column) + i * kPanelColumns,
                           static_cast<int32_t>(work.hv),
                           static_cast<int32_t>(work.range.begin + c * kScanChunk),
                           static_cast<int32_t>(work.range.batch)};
    ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, to + i * kTokenPanel, &map, at,
                              full);
  }
}

/// One lane of the load warp.
template <class T16, class S>
__device__ void load_tiles(ScanShared<T16, S>& shared, const ScanParams& p) {
  RingPosition<S::stages> at;
  for (int64_t index = blockIdx.x; index < scan_works<S>(p); index += gridDim.x) {
    const ScanWork work = scan_work<S>(p, index);
    for (int64_t c = 0; c < work.range.chunks; ++c, at.advance()) {
      auto& stage = shared.stages[at.stage];
      uint64_t* const full = &shared.full[at.stage];
      wait_for(&shared.empty[at.stage], at.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, full,
                                     static_cast<uint32_t>(sizeof(stage)));
      load_panels<S::K / kPanelColumns>(stage.w, p.w, 0, work, c, full);
      load_panels<S::groups>(stage.u, p.u, work.v0, work, c, full);
      load_panels<S::K / kPanelColumns>(stage.kg, p.kg, 0, work, c, full);
      if constexpr (S::raw_dq)
        load_panels<S::groups>(stage.grad_o, p.grad_o, work.v0, work, c, full);
    }
  }
}

template <int kWidth>
struct DecayRow {
  float value[kWidth];
};

/// The decay warp: 2^gamma of the last row of each chunk, K / 32 channels a lane. Evaluated once
/// for all state warps, which would each need every channel.
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
      const int64_t last = work.range.begin + c * kScanChunk + rows_of(work, c) - 1;
      for (int i = 0; i < kWidth; i += 2) {
        const float2 pair =
            __ldg(reinterpret_cast<const float2*>(gamma + last * p.gamma.stride[1] + i));
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
      ptx::mbarrier_arrive(&shared.full[at.stage]);
      row = next;
    }
  }
}

}  // namespace kda::cuda::sm90
