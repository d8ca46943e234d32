// prep: raw q, k, g, beta of chunks of 32 tokens and value heads -> their records (config.h).
//
// Grid: any number of blocks of 128 threads; each takes items (chunk, value head) in steps of the
// grid or, beside a scan, the first that nobody has taken. Order: the first chunks of all
// sequences, their heads, then the second chunks ..., of packed sequences rows of the chunk table.
// Heads run fastest, so that blocks that run together read neighbouring heads of the same tokens.
//
// Warps: warp w has tokens 8 w .. 8 w + 7 and all columns, K / 32 neighbouring ones a lane. G' is
// the log2 decay summed from the first token of a block of 16.
//
// Phases of an item (| a barrier):
//   1 decay   norms of the warp's rows of q and k, the diagonals of two products; gates and their
//             running sums, in the place of raw g (prep_gates.cuh) |
//   2 tiles   k 2^G, q 2^G, k 2^(G_end - G) to the record: products of 2^G' and 2^-G' with factors
//             of whole blocks; scaled tiles in the place of q, k and G' (prep_tiles.cuh) |
//   3 scores  q k^T to the record, k k^T to N (scores.cuh); one warp seeks the item after the next
//   |
//             copies of the next item's q, k, g start (cp.async)
//   4 solve   (I + L)^-1 (solve.cuh) by the warp whose turn it is; the others begin the next item
//
// Row i never depends on a later token, not even through rounding: o of a prefix is bit for bit the
// same whatever follows.
//
// A scan may run beside and read records as they are finished (PrepParams::ready): the grid then
// fills the GPU, and the blocks of the first SMs make room for it (PrepRoom); those of the others
// begin by turns, for the scan waits for the first records. Flags and counters are cleared by the
// launch ahead, for which the blocks wait. The scan waits only for blocks that are running or done.
//
// Loops over tokens are rolled: unrolled, the code misses the instruction cache, which costs more
// than the sums of gates in registers save (docs/kernels/chunk_fwd.md).
//
// Shared memory, bytes, K = 128, bf16 (fp16):
//   q, k, raw, then tiles                 17408 (52224: fp32 tiles apart)
//   g, G', then the tiles down, cross     16896 (26112)
//   N                                      4608
//   totals, biases, norms, beta, items     3824
#pragma once

#include "cuda/sm90/chunk_fwd/prep_gates.cuh"
#include "cuda/sm90/chunk_fwd/prep_items.cuh"
#include "cuda/sm90/chunk_fwd/prep_tiles.cuh"
#include "cuda/sm90/chunk_fwd/solve.cuh"
#include "cuda/tile/shared_memory.cuh"

namespace kda::cuda::sm90 {

static_assert(5 * (sizeof(PrepShared<__nv_bfloat16, 128>) + 1024) <= 228 * 1024);
static_assert(2 * (sizeof(PrepShared<__half, 128>) + 1024) <= 228 * 1024);

/// A block of prep on its way through the items. kBeside: of a grid that a scan runs beside.
template <class Io, int K, bool kBeside>
struct PrepBlock {
  using Traits = PrepTraits<Io, K>;
  using Shared = PrepShared<Io, K>;
  static constexpr int kPairs = Traits::kPairs;
  static constexpr int kTokens = Traits::kTokens;

  const PrepParams& p;
  Shared& shared;

  static __device__ __forceinline__ int warp() { return this_thread() / 32; }

  __device__ __forceinline__ PrepItem& item(uint32_t turn) const {
    return shared.item[turn % Shared::kItems];
  }
  __device__ __forceinline__ uint64_t record_of(const PrepItem& item) const {
    return static_cast<uint64_t>(__cvta_generic_to_global(p.records)) +
           uint64_t{item.record} * Record<K>::kBytes;
  }
  /// Starts the copies of the warp's rows.
  __device__ __forceinline__ void load(const PrepItem& item) const {
    const int first = warp() * kTokens;
    const int rows = item.rows - first;
    const auto from = [&](int input) { return row_start(p, item, input, rows > 0 ? first : 0); };
    constexpr int kStride = Traits::kStride * 2;
    copy_rows<2 * K, kBeside>(reinterpret_cast<unsigned char*>(shared.rows.raw_q()[first]), kStride,
                              from(0), p.q.stride[1] * 2, rows);
    copy_rows<2 * K, kBeside>(reinterpret_cast<unsigned char*>(shared.rows.raw_k()[first]), kStride,
                              from(1), p.k.stride[1] * 2, rows);
    load_gates(item);
  }
  __device__ __forceinline__ void load_gates(const PrepItem& item) const {
    const int first = warp() * kTokens;
    const int rows = item.rows - first;
    const std::byte* const from = row_start(p, item, 2, rows > 0 ? first : 0);
    unsigned char* const to = shared.rows.decay[first];
    if (is_wide(p.gate.g)) {
      copy_rows<4 * K, kBeside>(to, Traits::kDecayBytes, from, p.gate.g.stride[1] * 4, rows);
    } else {
      copy_rows<2 * K, kBeside>(to + 2 * K, Traits::kDecayBytes, from, p.gate.g.stride[1] * 2,
                                rows);
    }
    commit_copies();
  }

  __device__ __forceinline__ float bias_of_column(const PrepItem& item) const {
    if (p.gate.kind == kGateNone) return 0;
    return bias_of(p.gate, item.hv, this_thread() % K);
  }
  __device__ __forceinline__ void put_bias(uint32_t turn, float bias) const {
    const int column = this_thread();
    if (column < K) shared.bias[turn % 2][column] = bias;
  }

  /// Phase 1.
  __device__ __forceinline__ void decay(uint32_t turn) const {
    RawElement<float> beta{};
    if (this_thread() < kChunk && this_thread() < item(turn).rows) {
      beta = load_raw<float>(p.beta, item(turn).offset[3] + this_thread() * p.beta.stride[1]);
    }
    wait_for_copies<0>();
    __syncwarp();
    norm_rows(shared, p.qk_l2norm, warp() * kTokens);
    sum_gates(shared, p.gate, item(turn), shared.bias[turn % 2]);
    const int row = this_thread();
    if (row >= kChunk) return;
    float x = 0;
    if (row < item(turn).rows) {
      x = convert<float>(beta, p.beta.dtype);
      if (p.beta_sigmoid) x = p.beta_factor * sigmoid(x);
    }
    shared.beta[turn % 2][row] = x;
  }

  /// Phase 2.
  __device__ __forceinline__ void tiles(uint32_t turn) const {
    const int thread = this_thread();
    const int warp = thread / 32;
    const int column = thread % 32 * (2 * kPairs);
    const uint64_t record = record_of(item(turn));
    if (warp == 3) write_decay(shared, record, column);
    const bool has_far = warp < 2 ? write_tiles<Io, K, 0>(shared, record, warp, column)
                                  : write_tiles<Io, K, 1>(shared, record, warp, column);
    if (this_thread() == 0) shared.has_far = has_far;
  }

  /// Rows of scores that are far, from gates that are loaded and summed once more.
  __device__ __forceinline__ void replace_far(const PrepItem& item, uint32_t turn) const {
    load_gates(item);
    const int first = warp() * kTokens;
    const int column = this_thread() % 32 * (2 * kPairs);
    float2 before[kPairs];
    sum_before(before, shared, warp(), column);
    wait_for_copies<0>();
    __syncthreads();
    sum_gates(shared, p.gate, item, shared.bias[turn % 2]);
    for (int row = first; row < first + kTokens; ++row) {
      float2 G[kPairs];
      load_pairs(G, shared.G(row) + column);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) G[i] = G[i] + before[i];
      put_pairs(shared.G(row) + column, G);
    }
    __syncthreads();
    replace_far_rows(shared, shared.beta[turn % 2],
                     p.records + uint64_t{item.record} * Record<K>::kBytes,
                     static_cast<const Io*>(p.q.data) + item.offset[0], p.q.stride[1],
                     static_cast<const Io*>(p.k.data) + item.offset[1], p.k.stride[1], item.rows);
    __syncthreads();
  }

  /// After barriers that follow all other stores to the record: the release covers them.
  __device__ __forceinline__ void publish(const PrepItem& item) const {
    __syncwarp();
    if (this_thread() % 32 != 0) return;
    asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(p.ready + item.record) : "memory");
  }

  __device__ __forceinline__ void put_gate(PrepItem& item) const {
    if (item.rows == 0 || p.gate.kind == kGateNone) return;
    const FastGate gate = fast_gate_of(p.gate, item.hv);
    if (this_thread() % 32 == 0) item.gate = gate;
  }

  /// Finds the item after the next one; warp 3, which keeps the number of the one after that.
  __device__ __forceinline__ void find_after(uint32_t turn, uint32_t& number) const {
    PrepItem& found = item(turn + 2);
    find_item(found, p, number);
    __syncwarp();
    put_gate(found);
  }

  /// Finds the first two items and starts the loads of the first one; whether there is one.
  __device__ __forceinline__ bool start(uint32_t& number) const {
    if constexpr (!kBeside) {
      cudaTriggerProgrammaticLaunchCompletion();  // the summary of segments waits for this launch
    } else if (!stays(p)) {
      return false;
    }
    if (warp() == 3) {
      number = kBeside ? number_after(p, 0) : blockIdx.x;
      if (kBeside) wait_for_turn(p, number);
      find_item(shared.item[0], p, number);
    }
    __syncthreads();
    if (shared.item[0].rows == 0) return false;
    load(shared.item[0]);
    if (warp() == 0) {
      put_gate(shared.item[0]);
    } else if (warp() == 3) {
      find_after(~0u, number);
    }
    put_bias(0, bias_of_column(shared.item[0]));
    __syncthreads();
    if (shared.item[1].rows > 0) put_bias(1, bias_of_column(shared.item[1]));
    return true;
  }

  __device__ __forceinline__ void run() const {
    uint32_t number = 0;
    if (!start(number)) return;
    float bias = 0;  // of the item after the next
    for (uint32_t turn = 0;; ++turn) {
      decay(turn);
      if (turn > 0) put_bias(turn + 1, bias);
      __syncthreads();
      tiles(turn);
      __syncthreads();
      compute_scores(shared, shared.beta[turn % 2], record_of(item(turn)), warp());
      if (warp() == 3) find_after(turn, number);
      __syncthreads();
      if (shared.has_far) replace_far(item(turn), turn);
      const bool more = item(turn + 1).rows > 0;
      if (more) load(item(turn + 1));
      if (item(turn + 2).rows > 0) bias = bias_of_column(item(turn + 2));
      if (turn % Traits::kWarps == static_cast<uint32_t>(warp())) {
        write_solve(shared, shared.beta[turn % 2], record_of(item(turn)), p.contain);
        if (kBeside) publish(item(turn));
      }
      if (!more) return;
    }
  }
};

template <class Io, int K, bool kBeside>
__global__ void __launch_bounds__(kPrepThreads, kIsBf16<Io> ? kPrepBlocksPerSm : 2)
    sm90_chunk_fwd_prep(const __grid_constant__ PrepParams p) {
  PrepBlock<Io, K, kBeside>{p, *shared_memory<PrepShared<Io, K>>()}.run();
}

}  // namespace kda::cuda::sm90
