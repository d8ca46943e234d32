// Geometry of sm90_state_scan.
#pragma once

namespace kda::cuda::sm90 {

/// An instance. One consumer warpgroup holds 64 columns of V.
template <int kK, int kVTile, int kCluster, int kStages>
struct ScanShape {
  static constexpr int K = kK;
  static constexpr int v_tile = kVTile;     ///< columns of V a block: 64 or 128
  static constexpr int cluster = kCluster;  ///< blocks that share w and kg of a head
  static constexpr int stages = kStages;    ///< chunks on their way or in use
};
template <int K>
using NarrowScan = ScanShape<K, 64, 1, 4>;
template <int K, int kCluster>
using WideScan = ScanShape<K, 128, kCluster, K == 64 ? 4 : 3>;

inline constexpr int kScanChunk = 64;  ///< C
inline constexpr int kWarpgroupColumns = 64;
inline constexpr int kWarpgroupThreads = 128;
template <class S>
inline constexpr int kScanWarpgroups = S::v_tile / kWarpgroupColumns;
/// One warp starts the loads, one evaluates the decay. Two consumer warpgroups need more registers
/// than the 168 that a launch of 288 to 384 threads gives: there the producers are a whole
/// warpgroup, which hands its registers over.
template <class S>
inline constexpr int kScanProducerWarps = kScanWarpgroups<S> == 1 ? 2 : 4;
template <class S>
inline constexpr int kScanThreads =
    kScanWarpgroups<S>* kWarpgroupThreads + kScanProducerWarps<S> * 32;

/// Registers a thread after the hand-over.
inline constexpr int kProducerRegisters = 40;
inline constexpr int kConsumerRegisters = 232;
static_assert(kWarpgroupThreads * (kProducerRegisters + 2 * kConsumerRegisters) <= 65536);

}  // namespace kda::cuda::sm90
