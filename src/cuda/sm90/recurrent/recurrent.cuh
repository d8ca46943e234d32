// sm90_recurrent: decode at the speed of memory, without waves. States stream through shared memory
// by bulk copies; the warps that compute never wait for device memory.
//
// Grid: one block an SM. An item is a sequence and a value head, its state one contiguous piece of
// memory. A block takes one item a stage by its number, the rest from a counter in the workspace,
// which sm90_recurrent_start has set to zero.
//
// Warps:
//   0..7   consumers: a state from its stage into registers, all tokens, back into the stage
//   8..14  tokens: gate, norms and sigmoid of the tokens to come, one token a warp; zeros in o
//   15     producer (one thread): takes items; a bulk load per state in, a bulk store per state out
//
// Shared memory, bytes (fp32 / bf16 states):
//   stages   196608   3 / 6 states
//   tokens    20608   8 activated tokens
//   sums       8192   partial sums of K-first states, two tokens in turn
//   items, barriers   < 900
//
// Barriers (mbarrier; arrivals -> who waits):
//   announced[stage] producer -> token warps
//   loaded[stage]    producer, and the bytes of the load -> consumers
//   computed[stage]  8 consumer warps, and 7 token warps that have read the item -> producer
//   ready[slot]      the token's warp -> consumers
//   free[slot]       8 consumer warps -> token warps
// and bar.sync 1 and 2: the four consumer warps of a half of the columns (K-first only). Every lane
// of a warp arrives for itself: no time that could be measured, and racecheck can follow it.
//
// Sums run in the order of recurrent_step (cuda/recurrent/recurrent.cuh): the same bits.
#pragma once

#include <cuda/ptx>

#include "cuda/ptx/barrier.cuh"
#include "cuda/recurrent/tokens.cuh"
#include "cuda/sm90/recurrent/config.h"
#include "cuda/sm90/recurrent/instances/instances.h"
#include "cuda/sm90/recurrent/states.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/shared_memory.cuh"
#include "cuda/tile/vector16.cuh"

namespace kda::cuda::sm90 {

namespace ptx = ::cuda::ptx;

template <class State>
struct alignas(128) Shared {
  State stage[kStages<State>][kStateElements];
  TokenSlot tokens[kTokenSlots];
  Sums sums;
  RecurrentTile items[kStages<State>];
  uint64_t announced[kStages<State>];
  uint64_t loaded[kStages<State>];
  uint64_t computed[kStages<State>];
  uint64_t ready[kTokenSlots];
  uint64_t free[kTokenSlots];
};

__device__ __forceinline__ void arrive(uint64_t& barrier) {
  ptx::mbarrier_arrive(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &barrier);
}

/// What stands in place of an item behind the last one.
__device__ __forceinline__ bool is_end(const RecurrentTile& item) { return item.hv < 0; }

template <class Layout, class State>
__device__ __forceinline__ void consume(Shared<State>& shared, const Params& p) {
  using Vector = Vector16<State>;
  RingPosition<kStages<State>> stage;
  RingPosition<kTokenSlots> slot;
  uint32_t sums = 0;
  for (;; stage.advance()) {
    State* const memory = shared.stage[stage.stage];
    wait_for(&shared.loaded[stage.stage], stage.parity);
    const RecurrentTile& item = shared.items[stage.stage];
    if (is_end(item)) return;
    if (item.slot >= 0) {
      Layout state;
      if (p.initial_state.data) {
        state.each_vector(memory, [](float* x, const uint4* from) { Vector::unpack(*from, x); });
      } else {
        state = {};
      }
      int64_t o = token_offset(p.o, item.tokens.batch, item.tokens.begin, item.hv) +
                  Layout::own() * p.o.stride[3];
      for (int64_t left = item.count; left > 0; --left, slot.advance(), sums ^= 1) {
        wait_for(&shared.ready[slot.stage], slot.parity);
        state.step(shared.tokens[slot.stage], shared.sums, sums, p.o, o);
        o += p.o.stride[1];
        arrive(shared.free[slot.stage]);
      }
      if (p.final_state.data) {
        state.each_vector(memory, [](const float* x, uint4* to) { *to = Vector::pack(x); });
        publish_to_async_proxy();
      }
    }
    arrive(shared.computed[stage.stage]);
  }
}

/// The items of this block: one a stage by its number, then whichever is next. Blocks do not get
/// equal shares of the bandwidth: with equal shares of 4096 states of 64 KiB, loads and stores
/// alone take 0.1392 ms, from a counter 0.1335 (H200, bench/cuda/decode_floor.cu).
template <int STAGES>
struct Schedule {
  int64_t items;
  int own = 0;
  bool counting = false;

  __device__ __forceinline__ RecurrentTile take(const Params& p) {
    int64_t index = items;
    if (own < STAGES) {
      index = blockIdx.x + int64_t{own++} * gridDim.x;
    } else if (p.taken) {
      if (!counting) cudaGridDependencySynchronize();  // from here on the counter is there
      counting = true;
      index = int64_t{STAGES} * gridDim.x + static_cast<int64_t>(atomicAdd(p.taken, 1));
    }
    if (index < items) return recurrent_tile(p, index, kDim);
    RecurrentTile end{};
    end.hv = -1;
    return end;
  }
};

template <class State>
__device__ __forceinline__ State* state_of(const Tensor& t, const RecurrentTile& item) {
  return static_cast<State*>(t.data) + item.slot * t.stride[0] + item.hv * t.stride[1];
}

/// Tells the other warps of an item and starts the load of its state.
template <class State>
__device__ __forceinline__ void announce(Shared<State>& shared, int stage, const Params& p,
                                         const RecurrentTile& item) {
  constexpr uint32_t kBytes = kStateElements * sizeof(State);
  shared.items[stage] = item;
  arrive(shared.announced[stage]);
  uint64_t* const barrier = &shared.loaded[stage];
  if (is_end(item) || item.slot < 0 || !p.initial_state.data) return arrive(*barrier);
  ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, barrier,
                                 kBytes);
  ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, shared.stage[stage],
                     state_of<State>(p.initial_state, item), kBytes, barrier);
}

/// One thread: refills a stage as soon as its state has left. The next item is taken while the
/// consumers work: that takes two waits for memory.
template <class State>
__device__ __forceinline__ void produce(Shared<State>& shared, const Params& p) {
  constexpr int kAhead = kStages<State>;
  Schedule<kAhead> schedule{recurrent_tiles(p, kDim)};
  RecurrentTile next = schedule.take(p);
  bool ended = false;
  const auto refill = [&](int stage) {
    if (ended) return;
    announce(shared, stage, p, next);
    ended = is_end(next);
    if (!ended) next = schedule.take(p);
  };
  for (int stage = 0; stage < kAhead; ++stage) refill(stage);
  for (RingPosition<kAhead> stage;; stage.advance()) {
    const RecurrentTile item = shared.items[stage.stage];
    if (is_end(item)) return;
    wait_for(&shared.computed[stage.stage], stage.parity);
    if (item.slot >= 0 && p.final_state.data) {
      ptx::cp_async_bulk(ptx::space_global, ptx::space_shared, state_of<State>(p.final_state, item),
                         shared.stage[stage.stage], kStateElements * sizeof(State));
      ptx::cp_async_bulk_commit_group();
      ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>{});
    }
    refill(stage.stage);
  }
}

/// A token as it lies in memory: a lane's channels are lane, lane + 32, ...
struct RawToken {
  static constexpr int kEach = kDim / 32;
  RawElement<float> q[kEach], k[kEach], g[kEach], v[kEach], dt_bias[kEach], A_log, beta;

  __device__ __forceinline__ void load(const Params& p, const RecurrentTile& item, int64_t t) {
    const int64_t batch = item.tokens.batch;
    const int64_t token = item.tokens.begin + t;
    const int64_t h = divide(item.hv, p.heads.group).quotient;
    const auto row = [](const Tensor& from, int64_t base, RawElement<float>* to) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        to[i] = load_raw<float>(from, base + (lane_id() + 32 * i) * from.stride[3]);
      }
    };
    row(p.q, token_offset(p.q, batch, token, h), q);
    row(p.k, token_offset(p.k, batch, token, h), k);
    row(p.gate.g, token_offset(p.gate.g, batch, token, item.hv), g);
    row(p.v, token_offset(p.v, batch, token, item.hv), v);
    beta = load_raw<float>(p.beta, token_offset(p.beta, batch, token, item.hv));
    const Tensor& slope = p.gate.A_log;
    const Tensor& bias = p.gate.dt_bias;
    if (slope.data) A_log = load_raw<float>(slope, item.hv * slope.stride[0]);
    if (!bias.data) return;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      dt_bias[i] =
          load_raw<float>(bias, item.hv * bias.stride[0] + (lane_id() + 32 * i) * bias.stride[1]);
    }
  }

  template <class Layout, class State>
  __device__ __forceinline__ void activate(const Params& p, TokenSlot& to) const {
    Gate<float> gate;
    if (p.gate.A_log.data) {
      gate.slope = gate_slope(p.gate, convert<float>(A_log, p.gate.A_log.dtype));
    }
    Products<float> sums;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int c = lane_id() + 32 * i;
      if (p.gate.dt_bias.data) gate.bias = convert<float>(dt_bias[i], p.gate.dt_bias.dtype);
      const float qi = convert<float>(q[i], p.q.dtype);
      const float ki = convert<float>(k[i], p.k.dtype);
      sums.add(qi, ki);
      const int place = Layout::place_of(c);
      to.q[place] = qi;
      to.k[place] = ki;
      const Decay<float> decay =
          decay_of<State>(p.gate, gate, convert<float>(g[i], p.gate.g.dtype));
      to.decay[place] = decay.factor;
      if (kTwoFactors<State>) to.rest[place] = decay.rest;
      to.v[c] = convert<float>(v[i], p.v.dtype);
    }
    float rq, rk, qk;
    set_factors(p, sums, rq, rk, qk);
    if (lane_id() != 0) return;
    to.beta = beta_of(p, convert<float>(beta, p.beta.dtype));
    to.rq = rq;
    to.rk = rk;
    to.qk = qk;
  }
};

/// Warp `warp` of the token warps: every kTokenWarps-th token of the block.
template <class Layout, class State>
__device__ __forceinline__ void activate_tokens(Shared<State>& shared, const Params& p, int warp) {
  RingPosition<kTokenSlots> slot;
  slot.advance_by(warp);
  int64_t t = warp;
  for (RingPosition<kStages<State>> stage;; stage.advance()) {
    wait_for(&shared.announced[stage.stage], stage.parity);
    const RecurrentTile item = shared.items[stage.stage];
    arrive(shared.computed[stage.stage]);
    if (is_end(item)) return;
    write_zeros<float>(p, item, kDim, warp * 32 + lane_id(), kTokenWarps * 32);
    for (; t < item.count; t += kTokenWarps, slot.advance_by(kTokenWarps)) {
      RawToken raw;
      raw.load(p, item, t);
      wait_for(&shared.free[slot.stage], slot.parity ^ 1);
      raw.activate<Layout, State>(p, shared.tokens[slot.stage]);
      arrive(shared.ready[slot.stage]);
    }
    t -= item.count;
  }
}

template <class State>
__device__ __forceinline__ void init_barriers(Shared<State>& shared) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages<State>; ++i) {
      ptx::mbarrier_init(&shared.announced[i], 1);
      ptx::mbarrier_init(&shared.loaded[i], 1);
      ptx::mbarrier_init(&shared.computed[i], 32 * (kConsumerWarps + kTokenWarps));
    }
    for (int i = 0; i < kTokenSlots; ++i) {
      ptx::mbarrier_init(&shared.ready[i], 32);
      ptx::mbarrier_init(&shared.free[i], 32 * kConsumerWarps);
    }
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    publish_to_async_proxy();
  }
  __syncthreads();
}

template <class Layout, class State>
__global__ void __launch_bounds__(kThreads, 1) sm90_recurrent(const __grid_constant__ Params p) {
  auto& shared = *shared_memory<Shared<State>>();
  init_barriers(shared);
  if (warp_id() < kConsumerWarps) {
    consume<Layout>(shared, p);
  } else if (warp_id() < kConsumerWarps + kTokenWarps) {
    activate_tokens<Layout>(shared, p, warp_id() - kConsumerWarps);
  } else if (lane_id() == 0) {
    produce(shared, p);
  }
}

}  // namespace kda::cuda::sm90
