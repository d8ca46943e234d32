// The instances of sm90_state_scan: element type and K a file, the tilings of V in each.
#pragma once

#include "cuda/sm90/state_scan/state_scan.h"

namespace kda::cuda::sm90 {

/// How a launch spreads V over blocks.
enum class ScanTiling {
  kNarrow,         ///< 64 columns a block
  kWide,           ///< 128
  kNarrowRawDq,    ///< with dq_raw: 64 columns a block and part of dq_raw
  kWideRawDq,      ///< 128
  kWideRawDqPair,  ///< 256: a cluster of two blocks
};

ScanKernel state_scan_bf16_k64(ScanTiling tiling);
ScanKernel state_scan_bf16_k128(ScanTiling tiling);
ScanKernel state_scan_fp16_k64(ScanTiling tiling);
ScanKernel state_scan_fp16_k128(ScanTiling tiling);

/// Defines one of the functions above.
#define KDA_STATE_SCAN_INSTANCES(name, T16, K)                                                \
  template <class S>                                                                          \
  static ScanKernel instance() {                                                              \
    return {sm90_state_scan<T16, S>, S::v_tile, kScanThreads<S>, sizeof(ScanShared<T16, S>)}; \
  }                                                                                           \
  ScanKernel state_scan_##name(ScanTiling tiling) {                                           \
    switch (tiling) {                                                                         \
      case ScanTiling::kNarrow:                                                               \
        return instance<NarrowScan<K>>();                                                     \
      case ScanTiling::kWide:                                                                 \
        return instance<WideScan<K>>();                                                       \
      case ScanTiling::kNarrowRawDq:                                                          \
        return instance<NarrowRawDqScan<K>>();                                                \
      case ScanTiling::kWideRawDq:                                                            \
        return instance<WideRawDqScan<K, 1>>();                                               \
      default:                                                                                \
        return instance<WideRawDqScan<K, 2>>();                                               \
    }                                                                                         \
  }

}  // namespace kda::cuda::sm90
