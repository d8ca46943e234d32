// Geometry of sm90_state_scan.
#pragma once

namespace kda::cuda::sm90 {

/// An instance. One state warpgroup holds 64 columns of V.
template <int kK, int kVTile, int kStages, bool kRawDq = false, int kCluster = 1>
struct ScanShape {
  static constexpr int K = kK;
  static constexpr int v_tile = kVTile;       ///< columns of V a block: 64 or 128
  static constexpr int stages = kStages;      ///< chunks on their way or in use
  static constexpr bool raw_dq = kRawDq;      ///< dq_raw is asked for
  static constexpr int cluster = kCluster;    ///< blocks over which dq_raw is summed
  static constexpr int groups = v_tile / 64;  ///< state warpgroups
};
template <int K>
using NarrowScan = ScanShape<K, 64, 3>;
template <int K>
using WideScan = ScanShape<K, 128, 2>;
template <int K>
using NarrowRawDqScan = ScanShape<K, 64, 3, true>;
template <int K, int kCluster>
using WideRawDqScan = ScanShape<K, 128, K == 64 ? 3 : 2, true, kCluster>;

inline constexpr int kScanChunk = 64;  ///< C
inline constexpr int kWarpgroupColumns = 64;
inline constexpr int kWarpgroupThreads = 128;

/// Warpgroups that use the tensor cores: the state's, and one for dq_raw.
template <class S>
inline constexpr int kScanConsumers = S::groups + (S::raw_dq ? 1 : 0);
/// One warp starts the loads, one evaluates the decay. With two or more consumer warpgroups
/// the launch leaves too few registers a thread, and the producers are a whole warpgroup that hands
/// its registers over.
template <class S>
inline constexpr bool kMovesRegisters = kScanConsumers<S> > 1;
template <class S>
inline constexpr int kScanThreads = kScanConsumers<S>* kWarpgroupThreads +
                                    (kMovesRegisters<S> ? kWarpgroupThreads : 64);

/// Registers a thread after the hand-over: all that the launch of 512 threads has, where there are
/// two state warpgroups and dq_raw.
inline constexpr int kProducerRegisters = 40;
inline constexpr int kRawDqRegisters = 120;
template <class S>
inline constexpr int kStateRegisters = S::groups > 1 && S::raw_dq ? 176 : 232;
template <class S>
inline constexpr int kAllRegisters = kWarpgroupThreads*(kProducerRegisters +
                                                        S::groups * kStateRegisters<S> +
                                                        (S::raw_dq ? kRawDqRegisters : 0));
static_assert(kAllRegisters<WideScan<128>> <= 65536);
static_assert(kAllRegisters<NarrowRawDqScan<128>> <= 65536);
static_assert(kAllRegisters<WideRawDqScan<128, 1>> <= 65536);

}  // namespace kda::cuda::sm90
