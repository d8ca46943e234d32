// scan: the chunks of one sequence, value head and 64 or 128 columns of V in order; records and v
// -> o, checkpoints h, the final state.
//
// Grid: one block a (sequence, value head, tile of columns), columns fastest, so that the blocks of
// a head share its records in L2.
//
// Warps: `groups` consumer warpgroups of 64 columns each, then one whose first warp loads. A
// consumer keeps S^T [64 v x K k] in fp32 accumulators. Per chunk of 32 tokens, in the record's
// letters (config.h), where ke = k 2^G, qe = q 2^G, kg = k 2^(G_end - G), T = (I + L)^-1
// diag(beta), P = scores:
//   h^T = S^T packed to 16 bits                    the A operand of both reads, and the checkpoint
//   Z^T = h^T ke^T, O^T = h^T qe^T                 wgmma m64n32, A from registers
//   r^T = v^T - Z^T, v_new^T = r^T T^T             (4.16)
//   O^T += v_new^T P^T, o = scale O                (4.17), stored under the next chunk's reads
//   S^T = 2^G_end . S^T + v_new^T kg               (4.15)
// The re-scan of the backward leaves v_new in place of o: v_new^T = (beta r)^T (I + L)^-T, and
// neither O nor P takes part.
// Every A operand comes from accumulators of the step before: nothing of the recurrence passes
// through shared memory.
//
// Shared memory, bytes, K = 128, two warpgroups:
//   4 stages of: record 29696, v 2 x 4096          151552
//   staging of o 2 x 2 x 4096                       16384
//   staging of h 2 x 16384 (where h is wanted)      32768
//   barriers                                           64
//
// Barriers, each per stage: `full`: the loading lane's arrival with the record's bytes, and one of
// each loading lane once its part of v is there; consumers wait. `empty`: one arrival a consumer
// warp; the loading warp waits. Named barriers 1 + g: within consumer warpgroup g (staging).
#pragma once

#include <cuda/ptx>

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk_copy.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/setmaxnreg.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/chunk_fwd/chunk_fwd.h"
#include "cuda/sm90/chunk_fwd/config.h"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/sequence.cuh"

namespace kda::cuda::sm90 {

namespace ptx = ::cuda::ptx;

inline constexpr int32_t kFloat32 = 3;  ///< value of kda::DType

/// Where things lie in shared memory.
template <int K>
struct ForwardMemory {
  unsigned char* base;
  int groups;

  __device__ __forceinline__ int stage_bytes() const {
    return kStageRecordBytes<K> + groups * kTokenPanelBytes;
  }
  __device__ __forceinline__ unsigned char* record(int stage) const {
    return base + stage * stage_bytes();
  }
  __device__ __forceinline__ unsigned char* v(int stage, int group) const {
    return record(stage) + kStageRecordBytes<K> + group * kTokenPanelBytes;
  }
  /// Two buffers, so that one barrier a chunk orders writing and reading.
  __device__ __forceinline__ unsigned char* o(int group) const {
    return base + kForwardStages * stage_bytes() + group * 2 * kTokenPanelBytes;
  }
  __device__ __forceinline__ unsigned char* h(int group) const {
    return o(groups) + group * (K * kGroupColumns * 2);
  }
};

/// What a block works on.
struct ForwardWork {
  int64_t sequence;
  int64_t hv;
  int64_t v0;
  TokenRange range;
};

__device__ __forceinline__ ForwardWork forward_work(const ScanParams& p) {
  const int64_t columns = int64_t{p.groups} * kGroupColumns;
  const int64_t tiles = p.heads.V / columns;
  const int64_t head = blockIdx.x / tiles;
  ForwardWork work;
  work.v0 = blockIdx.x % tiles * columns;
  work.hv = head % p.heads.HV;
  work.sequence = head / p.heads.HV;
  work.range = chunks_of(p.sequences, work.sequence);
  return work;
}

__device__ __forceinline__ int rows_of(const ForwardWork& work, int64_t chunk) {
  const int64_t rest = work.range.end - work.range.begin - chunk * kChunk;
  return static_cast<int>(rest < kChunk ? rest : kChunk);
}

struct ForwardBarriers {
  uint64_t full[kForwardStages];
  uint64_t empty[kForwardStages];
};

/// The loading warp.
template <class Io, int K, Walk kWalk>
__device__ void load_chunks(const ScanParams& p, const ForwardWork& work,
                            const ForwardMemory<K>& memory, ForwardBarriers& barriers) {
  constexpr int kUnits = kGroupColumns / kUnitElements;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int unit = lane % kUnits;
  const Io* const v = static_cast<const Io*>(p.v.data) +
                      token_offset(p.v, work.range.batch, work.range.begin, work.hv) + work.v0;
  RingPosition<kForwardStages> at;
  for (int64_t i = 0; i < work.range.chunks; ++i, at.advance()) {
    const int64_t c = kWalk == Walk::kReverse ? work.range.chunks - 1 - i : i;
    wait_for(&barriers.empty[at.stage], at.parity ^ 1);
    uint64_t* const full = &barriers.full[at.stage];
    if (lane == 0) {
      constexpr uint32_t kBytes = kWalk == Walk::kForward ? Record<K>::kBeta : Record<K>::kBytes;
      ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, full,
                                     kBytes);
      ptx::cp_async_bulk(
          ptx::space_cluster, ptx::space_global, memory.record(at.stage),
          p.records + ((work.range.first_chunk + c) * p.heads.HV + work.hv) * Record<K>::kBytes,
          kBytes, full);
    }
    const int rows = rows_of(work, c);
    for (int group = 0; group < p.groups; ++group) {
      const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(memory.v(at.stage, group)));
#pragma unroll
      for (int row = lane / kUnits; row < kChunk; row += 32 / kUnits) {
        // Rows behind the last may be another sequence's, or no memory at all.
        const bool valid = row < rows;
        const Io* const from = v + (valid ? c * kChunk + row : 0) * p.v.stride[1] +
                               group * kGroupColumns + unit * kUnitElements;
        copy_async_16_or_zero(to + unit_offset(row, unit), from, valid);
      }
    }
    arrive_after_copies(full);
  }
}

/// Keeps what is computed with x on this side of the asm statements before.
template <int N>
__device__ __forceinline__ void pin(float (&x)[N]) {
#pragma unroll
  for (float& value : x) asm volatile("" : "+f"(value));
}

/// A consumer warpgroup.
template <class IoType, int HeadSize, Walk kOwnWalk = Walk::kForward>
struct ForwardConsumer {
  using Io = IoType;
  static constexpr int K = HeadSize;
  static constexpr Walk kWalk = kOwnWalk;
  static constexpr bool kHasO = kWalk == Walk::kForward;
  static constexpr int kState = K / 2;  ///< accumulator registers of S^T

  const ScanParams& p;
  const ForwardWork& work;
  const ForwardMemory<K>& memory;
  ForwardBarriers& barriers;
  int group;
  int thread;  ///< of the warpgroup
  FragmentLane at;
  TransposedLane lines;

  __device__ ForwardConsumer(const ScanParams& params, const ForwardWork& range,
                             const ForwardMemory<K>& shared, ForwardBarriers& sync, int warp,
                             int lane)
      : p(params),
        work(range),
        memory(shared),
        barriers(sync),
        group(warp / 4),
        thread(warp % 4 * 32 + lane),
        at(warp % 4, lane),
        lines(warp % 4, lane) {}

  __device__ __forceinline__ void sync() const { barrier_sync(1 + group, 128); }

  /// f(register, offset in the tensor) for every element of S^T that this thread holds.
  template <class F>
  __device__ __forceinline__ void each_element(const Tensor& t, F f) const {
    const int64_t base = work.sequence * t.stride[0] + work.hv * t.stride[1] +
                         (work.v0 + group * kGroupColumns + at.row) * t.stride[3] +
                         at.column * t.stride[2];
#pragma unroll
    for (int i = 0; i < kState; ++i) {
      f(i, base + (i / 4 * 8 + i % 2) * t.stride[2] + i / 2 % 2 * 8 * t.stride[3]);
    }
  }

  /// f(elements of the state tensor), which is fp32 or 16-bit.
  template <class F>
  static __device__ __forceinline__ void with_state(const Tensor& t, F f) {
    if (t.dtype == kFloat32) {
      f(static_cast<float*>(t.data));
    } else {
      f(static_cast<Io*>(t.data));
    }
  }

  __device__ __forceinline__ void load_state(float (&state)[kState]) const {
    const Tensor& t = p.initial_state;
    if (t.data == nullptr) {
#pragma unroll
      for (int i = 0; i < kState; ++i) state[i] = 0;
      return;
    }
    with_state(t, [&](auto* from) {
      each_element(t, [&](int i, int64_t offset) { state[i] = to_real<float>(from[offset]); });
    });
  }

  __device__ __forceinline__ void store_state(const float (&state)[kState]) const {
    const Tensor& t = p.final_state;
    if (t.data == nullptr) return;
    with_state(t, [&]<class T>(T* to) {
      each_element(t, [&](int i, int64_t offset) { to[offset] = from_real<T>(state[i]); });
    });
  }

  /// A panel [rows][64] of this warpgroup's columns from shared memory to rows of a tensor.
  __device__ __forceinline__ void copy_rows(const unsigned char* panel, Io* to, int64_t stride,
                                            int rows) const {
    for (int e = thread; e < rows * 8; e += 128) {
      *reinterpret_cast<uint4*>(to + e / 8 * stride + e % 8 * kUnitElements) =
          *reinterpret_cast<const uint4*>(panel + unit_offset(e / 8, e % 8));
    }
  }

  __device__ __forceinline__ void store_h(const uint32_t (&h)[kState / 2], int64_t chunk) const {
    const int per_row = p.chunk_size / kChunk;
    if (p.h.data == nullptr || chunk % per_row != 0) return;
    const int64_t first = p.h_rows
                              ? p.h_rows[work.sequence]
                              : work.sequence * ((p.sequences.T + p.chunk_size - 1) / p.chunk_size);
    const int64_t row = first + chunk / per_row;
    if (row >= p.h_row_count) return;  // wrong cu_seqlens
    unsigned char* const staging = memory.h(group);
    const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(staging));
#pragma unroll
    for (int step = 0; step < K / 16; ++step) {
      stmatrix_transposed(to + lines.offset(step), h + 4 * step);
    }
    sync();
    copy_rows(staging,
              static_cast<Io*>(p.h.data) + row * p.h.stride[0] + work.hv * p.h.stride[1] + work.v0 +
                  group * kGroupColumns,
              p.h.stride[2], K);
    sync();
  }

  /// Rows of o of the chunk before, from registers through `staging` to memory.
  __device__ __forceinline__ void store_o(const uint32_t (&o)[8], int64_t chunk, Io*& to) const {
    if (chunk < 0) return;
    unsigned char* const staging = memory.o(group) + chunk % 2 * kTokenPanelBytes;
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(staging));
    stmatrix_transposed(address + lines.offset(0), o);
    stmatrix_transposed(address + lines.offset(1), o + 4);
    sync();
    const int rows = chunk + 1 < work.range.chunks ? kChunk : rows_of(work, chunk);
    constexpr int kRowsAtOnce = 128 / 8;
#pragma unroll
    for (int i = 0; i < kChunk / kRowsAtOnce; ++i) {
      const int row = thread / 8 + i * kRowsAtOnce;
      if (row < rows) {
        *reinterpret_cast<uint4*>(to) =
            *reinterpret_cast<const uint4*>(staging + unit_offset(row, thread % 8));
      }
      to += kRowsAtOnce * p.o.stride[1];
    }
  }

  /// Split beta of the columns of pair i of packed accumulators [64 x 32].
  __device__ __forceinline__ float2 beta_of(const unsigned char* record, int i) const {
    return *reinterpret_cast<const float2*>(record + Record<K>::kBeta +
                                            (i / 2 * 8 + at.column) * 4);
  }

  __device__ __forceinline__ void decay(float (&state)[kState], const unsigned char* record) const {
    const auto* const factor = reinterpret_cast<const float*>(record + Record<K>::kDecay);
#pragma unroll
    for (int i = 0; i < kState / 4; ++i) {
      const float2 f = *reinterpret_cast<const float2*>(factor + 8 * i + at.column);
      state[4 * i] *= f.x;
      state[4 * i + 1] *= f.y;
      state[4 * i + 2] *= f.x;
      state[4 * i + 3] *= f.y;
    }
    pin(state);  // here, under the product in flight, and not where the compiler would sink it to
  }

  /// o: that of chunk c - 1, which leaves under the first products, then that of chunk c.
  __device__ __forceinline__ void chunk(float (&state)[kState], uint32_t (&o)[8], Io*& to,
                                        int64_t c,
                                        const RingPosition<kForwardStages>& position) const {
    const unsigned char* const record = memory.record(position.stage);
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(record));
    const PanelTile<2 * kChunk> ke{address + Record<K>::kRead};
    [[maybe_unused]] const PanelTile<2 * kChunk> qe{address + Record<K>::kRead +
                                                    kChunk * kPanelRowBytes};
    const PanelTile<kChunk> kg{address + Record<K>::kUpdate};
    const SquareTile T{address + Record<K>::kSolve};
    [[maybe_unused]] const SquareTile P{address + Record<K>::kScores};

    uint32_t h[kState / 2];
#pragma unroll
    for (int i = 0; i < kState / 2; ++i) h[i] = pack<Io>(state[2 * i], state[2 * i + 1]);
    wait_for(&barriers.full[position.stage], position.parity);
    float Z[16];
    [[maybe_unused]] float O[16];
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < K / 16; ++step) {
      wgmma_rs<Io, Major::kSummed>(Z, h + 4 * step, ke.columns(step), step > 0);
    }
    wgmma_commit();
    if constexpr (kHasO) {
#pragma unroll
      for (int step = 0; step < K / 16; ++step) {
        wgmma_rs<Io, Major::kSummed>(O, h + 4 * step, qe.columns(step), step > 0);
      }
      wgmma_commit();
    }

    store_o(o, c - 1, to);
    uint32_t r[8];
    const auto v = static_cast<uint32_t>(__cvta_generic_to_shared(memory.v(position.stage, group)));
    ldmatrix_transposed(r, v + lines.offset(0));
    ldmatrix_transposed(r + 4, v + lines.offset(1));
    wgmma_wait<kHasO ? 1 : 0>();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 value = unpack<Io>(r[i]);
      float2 rest{value.x - Z[2 * i], value.y - Z[2 * i + 1]};
      if constexpr (!kHasO) {
        const float2 beta = beta_of(record, i);
        rest = {beta.x * rest.x, beta.y * rest.y};
      }
      r[i] = pack<Io>(rest.x, rest.y);
    }
    float V[16];
    wgmma_fence();
    wgmma_rs<Io, Major::kSummed>(V, r, T.columns(0), false);
    wgmma_rs<Io, Major::kSummed>(V, r + 4, T.columns(1), true);
    wgmma_commit();
    decay(state, record);
    wgmma_wait<0>();
    store_h(h, c);
    uint32_t v_new[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v_new[i] = pack<Io>(V[2 * i], V[2 * i + 1]);
    wgmma_fence();
    if constexpr (kHasO) {
      wgmma_rs<Io, Major::kSummed>(O, v_new, P.columns(0), true);
      wgmma_rs<Io, Major::kSummed>(O, v_new + 4, P.columns(1), true);
      wgmma_commit();
    }
    wgmma_rs<Io, Major::kOuter>(state, v_new, kg.rows(0), true);
    wgmma_rs<Io, Major::kOuter>(state, v_new + 4, kg.rows(1), true);
    wgmma_commit();
    if constexpr (kHasO) wgmma_wait<1>();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      o[i] = kHasO ? pack<Io>(p.scale * O[2 * i], p.scale * O[2 * i + 1]) : v_new[i];
    }
    wgmma_wait<0>();
    __syncwarp();
    if (thread % 32 == 0) ptx::mbarrier_arrive(&barriers.empty[position.stage]);
  }

  __device__ void run() const {
    float state[kState];
    load_state(state);
    RingPosition<kForwardStages> position;
    uint32_t o[8];
    Io* to = static_cast<Io*>(p.o.data) +
             token_offset(p.o, work.range.batch, work.range.begin + thread / 8, work.hv) + work.v0 +
             group * kGroupColumns + thread % 8 * kUnitElements;
    for (int64_t c = 0; c < work.range.chunks; ++c, position.advance()) {
      chunk(state, o, to, c, position);
    }
    store_o(o, work.range.chunks - 1, to);
    store_state(state);
  }
};

/// Consumer: ForwardConsumer or what walks like it.
template <class Consumer>
__global__ void __launch_bounds__(forward_threads(kMostGroups), 1)
    sm90_chunk_scan(const __grid_constant__ ScanParams p) {
  extern __shared__ __align__(1024) unsigned char dynamic[];
  __shared__ ForwardBarriers barriers;
  // The reverse scan needs the records alone, which are complete: it starts as soon as the blocks
  // of the re-scan are all running, and ends after them.
  if constexpr (Consumer::kWalk == Walk::kRescan) cudaTriggerProgrammaticLaunchCompletion();
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const ForwardMemory<Consumer::K> memory{dynamic, p.groups};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kForwardStages; ++i) {
      ptx::mbarrier_init(&barriers.full[i], 33);
      ptx::mbarrier_init(&barriers.empty[i], static_cast<uint32_t>(4 * p.groups));
    }
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
  }
  __syncthreads();
  const ForwardWork work = forward_work(p);
  if (warp >= 4 * p.groups) {
    release_registers<kLoaderRegisters>();
    if (warp == 4 * p.groups)
      load_chunks<typename Consumer::Io, Consumer::K, Consumer::kWalk>(p, work, memory, barriers);
  } else {
    claim_registers<kStateRegisters>();
    Consumer(p, work, memory, barriers, warp, static_cast<int>(threadIdx.x) % 32).run();
  }
  if constexpr (Consumer::kWalk == Walk::kReverse) cudaGridDependencySynchronize();
}

}  // namespace kda::cuda::sm90
