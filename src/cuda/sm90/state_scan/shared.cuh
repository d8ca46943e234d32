// What the warps of sm90_state_scan share: the block's memory, its barriers and its work list.
#pragma once

#include <cuda/ptx>

#include "cuda/sm90/state_scan/state_scan.h"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/swizzle.cuh"

namespace kda::cuda::sm90 {

namespace ptx = ::cuda::ptx;

/// Elements of a panel of 64 tokens.
inline constexpr int kTokenPanel = kScanChunk * kPanelColumns;

template <class T16, class S, bool kWithDo>
struct ScanStage {
  T16 w[kScanChunk * S::K];
  T16 kg[kScanChunk * S::K];
  T16 u[kScanChunk * S::v_tile];
};
template <class T16, class S>
struct ScanStage<T16, S, true> : ScanStage<T16, S, false> {
  T16 grad_o[kScanChunk * S::v_tile];
};

/// What only dq_raw needs.
template <class S, bool kPresent>
struct RawDqShared {};
template <class S>
struct RawDqShared<S, true> {
  /// A half of the partial sums of the cluster's other block: [register / 4][thread][4].
  float landing[S::cluster > 1 ? kScanChunk* S::K / 2 : 4];
  uint64_t h_full;  ///< one arrival a state warpgroup: its h lies in the staging
  uint64_t h_read;  ///< one a warp of the dq warpgroup: it has been multiplied
  uint64_t landing_full;
  uint64_t landing_free;
};

template <class T16, class S>
struct alignas(1024) ScanShared {
  using Stage = ScanStage<T16, S, S::raw_dq>;
  Stage stages[S::stages];
  T16 h[S::groups][S::K * kWarpgroupColumns];
  T16 v_new[S::groups][kTokenPanel];
  float decay[S::stages][S::K];
  uint64_t full[S::stages];
  uint64_t empty[S::stages];
  RawDqShared<S, S::raw_dq> dq;
};
template <class T16, class S>
inline constexpr bool kFitsHopper = sizeof(ScanShared<T16, S>) <= 227 * 1024;

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

/// Rows of chunk c that belong to the sequence.
__device__ __forceinline__ int rows_of(const ScanWork& work, int64_t c) {
  const int64_t rest = work.range.end - work.range.begin - c * kScanChunk;
  return static_cast<int>(rest < kScanChunk ? rest : kScanChunk);
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace kda::cuda::sm90
