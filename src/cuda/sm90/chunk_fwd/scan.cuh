// scan: the chunks of one sequence, value head and 64 or 128 columns of V in order; records and v
// -> o, checkpoints h, the final state.
//
// Grid: one block a (sequence or segment of it, value head, tile of columns), columns fastest, so
// that the blocks of a head share its records in L2.
//
// Warps: `groups` consumer warpgroups of 64 columns each, one warp that loads, and one a warpgroup
// that stores (kSummary: none): with few heads time is that of a consumer's instructions. A
// consumer keeps S^T [64 v x K k] in fp32 accumulators. Per chunk of 32 tokens, in the record's
// letters (config.h), where ke = k 2^G, qe = q 2^G, kg = k 2^(G_end - G), A1 = (I + L)^-1 - I,
// P = scores:
//   h^T = S^T packed to 16 bits                    the A operand of both reads, and the checkpoint
//   Z^T = h^T ke^T, O^T = h^T qe^T                 wgmma m64n32, A from registers
//   r^T = beta (v^T - Z^T), v_new^T = r^T + r^T A1^T   (4.16), the first r in fp32
//   O^T += v_new^T P^T, o = scale O                (4.17), leaves under the next product
//   S^T = 2^G_end . S^T + v_new^T kg               (4.15)
// The re-scan of the backward leaves v_new in place of o, and neither O nor P takes part. The
// summary of a segment leaves S alone, started from 0, and in K more columns, with v = 0 and
// started from the identity, the matrix by which the segment changes any state; from these
// `compose` makes the start of each segment, which kForward then walks. Every A operand comes from
// accumulators of the step before: nothing of the recurrence passes through shared memory.
//
// Shared memory, bytes, K = 128, two warpgroups:
//   4 stages of: record 29696, v 2 x 4096          151552
//   staging of o 2 x 2 x 4096                       16384
//   staging of h 2 x 16384 (where h is wanted)      32768
//   barriers                                          144
// One warpgroup alone on an SM has 6 stages, so that records arrive in time while prep runs.
//
// Barriers, each per stage: `full`: the loading lane's arrival with the bytes of the record and of
// v; consumers wait. `empty`: one arrival a consumer thread; the loading lane waits. For each
// buffer of a staging: a named barrier where the consumers arrive and the storing warp waits, and
// `o_free` or `h_free`, where its first lane arrives once the warp, or its copy of h, has read it;
// consumers wait. Named barriers 1 + g: within consumer warpgroup g (rev_unit.cuh).
//
// kForward takes v for finite: no instruction of a chunk looks. What is not finite would reach back
// to earlier tokens of its chunk; but it also stays in the state, so a block whose last state is
// not finite walks once more, with care (not_finite.cuh), before it stores the state.
//
// Beside prep (ScanParams.ready) the loading warp also waits for the flags of the records.
//
// Where the caller kept the checkpoints of the forward, the re-scan walks segments too, each from
// the checkpoint at its first token, and leaves v_new alone.
#pragma once

#include "cuda/sm90/chunk_fwd/scan_consumer.cuh"
#include "cuda/sm90/chunk_fwd/scan_load.cuh"
#include "cuda/sm90/chunk_fwd/scan_store.cuh"

namespace kda::cuda::sm90 {

/// A walk by all warps of a block. before: chunks of an earlier one.
template <class Consumer, bool kTrusting>
__device__ __forceinline__ void walk_chunks(const ScanParams& p, const ForwardWork& work,
                                            const ForwardMemory<Consumer::K>& memory,
                                            ForwardBarriers& barriers, const Consumer& consumer,
                                            float (&state)[Consumer::kState], int32_t before,
                                            int warp) {
  if (warp < 4 * p.shape.groups) {
    consumer.template walk<kTrusting>(state, before);
  } else if (warp == 4 * p.shape.groups) {
    load_chunks<typename Consumer::Io, Consumer::K, Consumer::kWalk>(p, work, memory, barriers,
                                                                     before);
  } else if constexpr (kHasStoringWarps<Consumer::kWalk>) {
    const int group = warp - 4 * p.shape.groups - 1;
    store_chunks<typename Consumer::Io, Consumer::K, Consumer::kWalk>(p, work, memory, barriers,
                                                                      group, before);
  }
}

/// Consumer: ForwardConsumer or what walks like it.
template <class Consumer>
__global__ void __maxnreg__(kScanRegisters) sm90_chunk_scan(const __grid_constant__ ScanParams p) {
  extern __shared__ __align__(1024) unsigned char dynamic[];
  __shared__ ForwardBarriers barriers;
  // Both scans of the backward need the records alone, which are complete: the second one starts as
  // soon as the blocks of the first are all running, and ends after them. What follows the summary
  // waits for it.
  if constexpr (Consumer::kWalk != Walk::kForward) cudaTriggerProgrammaticLaunchCompletion();
  const ForwardWork work = forward_work(p);
  if (Consumer::kWalk != Walk::kRescan && p.segment > 0) cudaGridDependencySynchronize();
  if (nothing_to_do<Consumer::kWalk>(p, work)) return;
  if (threadIdx.x == 0) init(barriers, p.shape);
  __syncthreads();
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const bool consumes = warp < 4 * p.shape.groups;
  const ForwardMemory<Consumer::K> memory{dynamic, p.shape.groups, p.shape.stages};
  const Consumer consumer(p, work, memory, barriers, warp, static_cast<int>(threadIdx.x) % 32);
  float state[Consumer::kState];
  constexpr bool kTrusting = kTrusts<Consumer::kWalk>;
  walk_chunks<Consumer, kTrusting>(p, work, memory, barriers, consumer, state, 0, warp);
  if constexpr (kTrusting) {
    if (__syncthreads_or(consumes && !all_finite(state))) {
      __syncthreads();  // or the compiler spills for what both walks need
      walk_chunks<Consumer, false>(p, work, memory, barriers, consumer, state, work.chunks, warp);
    }
  }
  if (consumes) consumer.finish(state);
  // What ran beside this kernel has to be over when this kernel is. Blocks of segments are many and
  // short, and each that waited would keep an SM from the next: block 0, which always has a
  // segment, waits for all.
  if (Consumer::kWalk != Walk::kRescan || (p.segment > 0 && blockIdx.x == 0)) {
    cudaGridDependencySynchronize();
  }
}

}  // namespace kda::cuda::sm90
