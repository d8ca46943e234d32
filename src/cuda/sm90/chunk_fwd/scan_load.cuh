// What the blocks of scan work on, where it lies in shared memory, and the warp that loads it.
#pragma once

#include <cuda/ptx>

#include "cuda/ptx/barrier.cuh"
#include "cuda/sm90/chunk_fwd/chunk_fwd.h"
#include "cuda/sm90/chunk_fwd/config.h"
#include "cuda/sm90/chunk_fwd/segments.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/swizzle.cuh"

namespace kda::cuda::sm90 {

namespace ptx = ::cuda::ptx;

/// Where things lie in shared memory.
template <int K>
struct ForwardMemory {
  unsigned char* base;
  int groups;
  int stages;

  __device__ __forceinline__ int stage_bytes() const {
    return kStageRecordBytes<K> + groups * kTokenPanelBytes;
  }
  __device__ __forceinline__ unsigned char* record(int stage) const {
    return base + stage * stage_bytes();
  }
  __device__ __forceinline__ unsigned char* v(int stage, int group) const {
    return record(stage) + kStageRecordBytes<K> + group * kTokenPanelBytes;
  }
  /// The staging of o: two buffers, in turns.
  __device__ __forceinline__ unsigned char* o(int group, int buffer) const {
    return base + stages * stage_bytes() + (2 * group + buffer) * kTokenPanelBytes;
  }
  __device__ __forceinline__ unsigned char* h(int group) const {
    return o(groups, 0) + group * (K * kGroupColumns * 2);
  }
};

/// What a block works on.
struct ForwardWork {
  int64_t sequence;
  int64_t hv;
  int64_t v0;
  TokenRange range;  ///< of the sequence or of a segment of it
  int32_t chunks;
  int32_t last_rows;  ///< rows of the last chunk; the others have all
  int32_t first_h;    ///< row of h of the first chunk
  SegmentOf segment;
};

__device__ __forceinline__ ForwardWork forward_work(const ScanParams& p) {
  const int64_t columns = int64_t{p.shape.groups} * kGroupColumns;
  const bool has_transitions = p.transitions.data != nullptr;
  const int64_t tiles = (p.heads.V + (has_transitions ? p.heads.K : 0)) / columns;
  const int64_t head = blockIdx.x / tiles;
  ForwardWork work;
  work.v0 = blockIdx.x % tiles * columns;
  work.hv = head % p.heads.HV;
  const int64_t row = head / p.heads.HV;
  work.sequence = p.segment == 0 ? row : sequence_of_segment(p.sequences, p.segment, row);
  work.range = chunks_of(p.sequences, work.sequence);
  const int64_t rows = (p.sequences.T + p.chunk_size - 1) / p.chunk_size;
  work.first_h = static_cast<int32_t>(p.h_rows ? p.h_rows[work.sequence] : work.sequence * rows);
  if (p.segment > 0) {
    work.segment = cut_segment(p.sequences, p.segment, work.sequence, row, work.range);
    work.first_h += static_cast<int32_t>(work.segment.index * (p.segment / p.chunk_size));
  }
  work.chunks = static_cast<int32_t>(work.range.chunks);
  const int64_t rest = work.range.end - work.range.begin - (work.range.chunks - 1) * kChunk;
  work.last_rows = static_cast<int32_t>(rest < kChunk ? rest : kChunk);
  return work;
}

/// Where a row belongs to no segment, and for kSummary where nobody needs the result: that of a
/// last segment, and how the first one changes a state, for it starts from the given one.
template <Walk kWalk>
__device__ __forceinline__ bool nothing_to_do(const ScanParams& p, const ForwardWork& work) {
  if (!work.segment.exists) return true;
  if (kWalk != Walk::kSummary) return false;
  return work.segment.is_last || (work.segment.index == 0 && work.v0 >= p.heads.V);
}

__device__ __forceinline__ int rows_of(const ForwardWork& work, int32_t chunk) {
  return chunk + 1 < work.chunks ? kChunk : work.last_rows;
}

/// Chunks from the first one on that have all their rows.
__device__ __forceinline__ int32_t whole_chunks(const ForwardWork& work) {
  return work.last_rows < kChunk ? work.chunks - 1 : work.chunks;
}

/// Whether a walk takes v for finite and looks at the last state, in which what is not finite
/// stays: where it is not, the block walks again, with care.
template <Walk kWalk>
inline constexpr bool kTrusts = kWalk == Walk::kForward;

struct ForwardBarriers {
  uint64_t full[kMostStages];
  uint64_t empty[kMostStages];
  uint64_t o_free[kMostGroups][2];
  uint64_t h_free[kMostGroups];
};

__device__ __forceinline__ void init(ForwardBarriers& barriers, const ScanShape& shape) {
  for (int i = 0; i < shape.stages; ++i) {
    ptx::mbarrier_init(&barriers.full[i], 1);
    ptx::mbarrier_init(&barriers.empty[i], static_cast<uint32_t>(128 * shape.groups));
  }
  for (int group = 0; group < shape.groups; ++group) {
    ptx::mbarrier_init(&barriers.o_free[group][0], 1);
    ptx::mbarrier_init(&barriers.o_free[group][1], 1);
    ptx::mbarrier_init(&barriers.h_free[group], 1);
  }
  ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
}

/// RingPosition where the number of stages is the launch's.
struct StagePosition {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  /// That of a chunk; turn: chunks before it, of an earlier walk too.
  static __device__ __forceinline__ StagePosition of(int32_t turn, int stages) {
    return {turn % stages, static_cast<uint32_t>(turn / stages & 1)};
  }
};

/// Of records c, c + 1, .. c + 31 those from c on that prep has published, at least one; all lanes
/// of a warp. They may be copied afterwards, which reads them through the async proxy.
///
/// Prep is ahead of scan in the stream, and scan starts once each block of prep has said so: they
/// all run, need nothing of scan, and end. So this wait ends too, also where kernels run one by
/// one.
__device__ __forceinline__ int wait_for_records(const uint32_t* ready, int64_t stride, int rest) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t missing = 0;
  do {
    uint32_t value = 0;
    if (lane < rest) {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                   : "=r"(value)
                   : "l"(ready + lane * stride)
                   : "memory");
    }
    missing = __ballot_sync(~0u, value == 0);
  } while ((missing & 1) != 0);
  __syncwarp();
  ptx::fence_proxy_async(ptx::space_global);
  return missing == 0 ? 32 : __ffs(static_cast<int>(missing)) - 1;
}

/// Bytes of a record that a walk reads. The re-scan and the summary need neither q 2^G nor
/// the scores.
template <int K, Walk kWalk>
inline constexpr int kReadBytes = kWalk == Walk::kForward || kWalk == Walk::kReverse
                                      ? Record<K>::kBytes
                                      : Record<K>::kBytes - K* kChunk * 2 - kChunk* kChunk * 2;

/// copy(first byte, bytes) of each part of them.
template <int K, Walk kWalk, class Copy>
__device__ __forceinline__ void each_part(Copy copy) {
  if constexpr (kWalk == Walk::kForward || kWalk == Walk::kReverse) {
    copy(0, kReadBytes<K, kWalk>);
  } else {
    constexpr int kKeys = kChunk * kPanelRowBytes;
#pragma unroll
    for (int panel = 0; panel < K / 64; ++panel) {
      copy(Record<K>::kRead + 2 * panel * kKeys, kKeys);
    }
    copy(Record<K>::kUpdate, Record<K>::kScores - Record<K>::kUpdate);
    copy(Record<K>::kDecay, Record<K>::kBytes - Record<K>::kDecay);
  }
}

/// The loading warp. before: chunks of an earlier walk.
template <class Io, int K, Walk kWalk>
__device__ void load_chunks(const ScanParams& p, const ForwardWork& work,
                            const ForwardMemory<K>& memory, ForwardBarriers& barriers,
                            int32_t before) {
  constexpr int kBytes = kReadBytes<K, kWalk>;
  int groups = p.shape.groups;  // that have columns of V
  if constexpr (kWalk == Walk::kSummary) {
    const int64_t left = (p.heads.V - work.v0) / kGroupColumns;
    groups = static_cast<int>(left < 0 ? 0 : left < groups ? left : groups);
  }
  const auto bytes = static_cast<uint32_t>(kBytes + groups * kTokenPanelBytes);
  const bool leads = threadIdx.x % 32 == 0;
  int ready = work.chunks;
  if constexpr (kWalk == Walk::kForward) {
    if (p.ready != nullptr) {
      ready = 0;
    } else {
      cudaGridDependencySynchronize();  // prep, or compose
    }
  }
  StagePosition at = StagePosition::of(before, memory.stages);
  for (int32_t i = 0; i < work.chunks; ++i, at.advance(memory.stages)) {
    const int32_t c = kWalk == Walk::kReverse ? work.chunks - 1 - i : i;
    const int64_t record = (work.range.first_chunk + c) * p.heads.HV + work.hv;
    if (i == ready) {
      ready += wait_for_records(p.ready + record, p.heads.HV, work.chunks - i);
    }
    if (!leads) continue;
    wait_for(&barriers.empty[at.stage], at.parity ^ 1);
    uint64_t* const full = &barriers.full[at.stage];
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, full,
                                   bytes);
    each_part<K, kWalk>([&](int first, int bytes) {
      ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, memory.record(at.stage) + first,
                         p.records + record * Record<K>::kBytes + first,
                         static_cast<uint32_t>(bytes), full);
    });
    for (int group = 0; group < groups; ++group) {
      const int32_t from[4] = {static_cast<int32_t>(work.v0) + group * kGroupColumns,
                               static_cast<int32_t>(work.hv),
                               static_cast<int32_t>(work.range.begin + int64_t{c} * kChunk),
                               static_cast<int32_t>(work.range.batch)};
      ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, memory.v(at.stage, group),
                                &p.v_map, from, full);
    }
  }
  // Or the lanes that only count chunks are at the kernel's end at once, and a warp that waits
  // there for the launch before this one (cudaGridDependencySynchronize) loads nothing meanwhile:
  // the second scan of the backward stood until the first was over.
  __syncwarp();
}

}  // namespace kda::cuda::sm90
