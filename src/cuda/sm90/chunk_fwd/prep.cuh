// prep: raw q, k, g, beta of chunks of 32 tokens and value heads -> their records (config.h).
//
// Grid: any number of blocks of 128 threads; each takes items (chunk, value head) in steps of the
// grid. Order: the first chunks of all sequences, their heads, then the second chunks ..., of
// packed sequences rows of the chunk table. Heads run fastest, so that blocks that run together
// read neighbouring heads of the same tokens.
//
// Warps: warp w has tokens 8 w .. 8 w + 7 and all columns, K / 32 neighbouring ones a lane. G' is
// the log2 decay summed from the first token of a block of 16.
//
// Phases of an item (| a barrier):
//   1 decay   the warp's q, k (cp.async) and g have been on their way since the item before; gates,
//             running sums; norms of its 8 rows of q and k, the diagonals of two products; totals |
//   2 tiles   k 2^G, q 2^G, k 2^(G_end - G) to the record, products of 2^G' and 2^-G' with factors
//             of whole blocks; the scaled tiles of scores.cuh to shared memory |
//   3 scores  q k^T to the record, k k^T to N (scores.cuh) |
//             loads of the next item
//   4 solve   (I + L)^-1 (solve.cuh), each warp in its turn, while the others begin the next item
//
// Row i never depends on a later token, not even through rounding: o of a prefix is bit for bit the
// same whatever follows.
//
// A scan that runs beside reads records as they are finished: `ready` (config as PrepParams says).
// A block clears the flags of its own items before it lets the next launch start, so that every
// flag that the scan sees is of this run, and every block that sets one is running or done.
//
// Shared memory, K = 128, bf16 (fp16): q, k 17408 (52224 with their fp32 tiles); down, cross 13056
// (26112); N 4608; totals 2048; norms, beta 512 = 37632 (85504) bytes.
#pragma once

#include "cuda/ptx/bulk_copy.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/sm90/chunk_fwd/solve.cuh"
#include "cuda/tile/shared_memory.cuh"

namespace kda::cuda::sm90 {

/// The chunk, its row and the value head of a number: first chunks of all sequences first, heads
/// fastest; rows of the chunk table for packed sequences.
struct PrepPlace {
  Chunk chunk;
  uint32_t row;
  uint32_t hv;
};
__device__ __forceinline__ PrepPlace place_of(const Sequences& s, uint32_t heads, uint32_t number) {
  PrepPlace place;
  place.row = number / heads;
  place.hv = number - place.row * heads;
  if (s.cu.data) {
    place.chunk = chunk_of(s, place.row);
    return place;
  }
  const auto batches = static_cast<uint32_t>(s.count);
  const uint32_t chunk = place.row / batches;
  const uint32_t batch = place.row - chunk * batches;
  place.row = batch * static_cast<uint32_t>(s.chunks_per_row) + chunk;
  place.chunk.batch = batch;
  place.chunk.begin = int64_t{chunk} * kChunk;
  const int64_t rest = s.T - place.chunk.begin;
  place.chunk.rows = static_cast<int32_t>(rest < kChunk ? rest : kChunk);
  return place;
}

/// q, k, g, beta.
__device__ __forceinline__ const Tensor& input_of(const PrepParams& p, int input) {
  return input == 0 ? p.q : (input == 1 ? p.k : (input == 2 ? p.gate.g : p.beta));
}

/// The item of a number, or the first one after it in the block's steps that has rows; rows == 0:
/// there is none. One warp finds it for all, an input a lane.
__device__ __forceinline__ void find_item(PrepItem& item, const PrepParams& p, uint64_t number) {
  const int lane = this_thread() % 32;
  const auto heads = static_cast<uint32_t>(p.heads.HV);
  int32_t rows = 0;
  for (; number < static_cast<uint64_t>(p.sequences.chunk_rows) * heads; number += gridDim.x) {
    const PrepPlace at = place_of(p.sequences, heads, static_cast<uint32_t>(number));
    rows = at.chunk.rows;
    if (rows == 0) continue;
    const uint32_t head = lane < 2 ? at.hv / static_cast<uint32_t>(p.heads.group) : at.hv;
    if (lane < 4) {
      item.offset[lane] = token_offset(input_of(p, lane), at.chunk.batch, at.chunk.begin, head);
    }
    if (lane == 0) {
      item.number = static_cast<uint32_t>(number);
      item.hv = at.hv;
      item.record = at.row * heads + at.hv;
    }
    break;
  }
  if (lane == 0) item.rows = rows;
}

/// Clears the flags of this block's items and lets the next launch start.
__device__ __forceinline__ void clear_ready(const PrepParams& p) {
  const auto heads = static_cast<uint32_t>(p.heads.HV);
  const uint64_t count = static_cast<uint64_t>(p.sequences.chunk_rows) * heads;
  for (uint64_t number = blockIdx.x + uint64_t{threadIdx.x} * gridDim.x; number < count;
       number += uint64_t{kPrepThreads} * gridDim.x) {
    const PrepPlace at = place_of(p.sequences, heads, static_cast<uint32_t>(number));
    p.ready[at.row * heads + at.hv] = 0;
  }
  __threadfence();
  __syncthreads();
  cudaTriggerProgrammaticLaunchCompletion();
}

__device__ __forceinline__ bool is_wide(const Tensor& t) {
  return t.dtype != kBFloat16 && t.dtype != kFloat16;
}

/// The warp's rows, of kBytes each, to shared memory; zeros from `rows` on.
template <int kBytes>
__device__ __forceinline__ void copy_rows(unsigned char* shared, int shared_stride,
                                          const std::byte* from, int64_t stride, int rows) {
  constexpr int kPieces = kBytes / 16;
  constexpr int kAtOnce = 32 / kPieces;
  const int lane = this_thread() % 32;
  const int row = lane / kPieces;
  auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared)) +
            static_cast<uint32_t>(row * shared_stride + lane % kPieces * 16);
  const std::byte* piece = from + row * stride + lane % kPieces * 16;
  if (rows >= 8) {
#pragma unroll
    for (int i = 0; i < 8; i += kAtOnce) {
      copy_async_16(to + static_cast<uint32_t>(i * shared_stride), piece);
      piece += kAtOnce * stride;
    }
  } else {
    for (int i = 0; i < 8; i += kAtOnce) {
      const bool valid = row + i < rows;
      copy_async_16_or_zero(to + static_cast<uint32_t>(i * shared_stride), valid ? piece : from,
                            valid);
      piece += kAtOnce * stride;
    }
  }
}

/// A row of the warp's q, k or g in memory, and its bytes.
struct PrepRowBytes {
  const std::byte* start;
  uint32_t bytes;
};
template <int K>
__device__ __forceinline__ PrepRowBytes bytes_of(const PrepParams& p, const PrepItem& item,
                                                 int input, int row) {
  const Tensor& t = input_of(p, input);
  const uint32_t size = is_wide(t) ? 4 : 2;
  return {static_cast<const std::byte*>(t.data) + (item.offset[input] + row * t.stride[1]) * size,
          K * size};
}

/// 1 / |row| of the warp's rows of q and k: the diagonals of q q^T and k k^T.
template <class Io, int K>
__device__ __forceinline__ void norm_rows(PrepShared<Io, K>& shared, bool wanted, int first) {
  const int lane = this_thread() % 32;
  const int g = lane / 4;
  float2 norm{1, 1};
  if (wanted) {
    float q[4] = {};
    float k[4] = {};
    const auto* const raw = lane / 8 % 2 == 0 ? shared.rows.raw_q() : shared.rows.raw_k();
    const auto at =
        static_cast<uint32_t>(__cvta_generic_to_shared(&raw[first + lane % 8][lane / 16 * 8]));
#pragma unroll
    for (int step = 0; step < K / 16; ++step) {
      uint32_t row[4];  // q, k, then the same of the next 8 columns
      ldmatrix(row, at + 32 * step);
      const uint32_t column[4] = {row[0], row[2], row[1], row[3]};
      if constexpr (kIsBf16<Io>) {
        mma_bf16(q, row, column);
        mma_bf16(k, row, column + 2);
      } else {
        mma_fp16(q, row, column);
        mma_fp16(k, row, column + 2);
      }
    }
    norm = {rsqrtf((g % 2 == 0 ? q[0] : q[1]) + 1e-6f), rsqrtf((g % 2 == 0 ? k[2] : k[3]) + 1e-6f)};
  }
  if (lane % 4 == g / 2) shared.norm[first + g] = norm;
}

template <class T16, int PAIRS>
__device__ __forceinline__ Words<PAIRS> pack_pairs(const float2 (&x)[PAIRS]) {
  Words<PAIRS> words;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) words.word[i] = pack<T16>(x[i].x, x[i].y);
  return words;
}
template <int PAIRS>
__device__ __forceinline__ void put_pairs(__nv_bfloat16* to, const float2 (&x)[PAIRS]) {
  *reinterpret_cast<Words<PAIRS>*>(to) = pack_pairs<__nv_bfloat16>(x);
}
template <int PAIRS>
__device__ __forceinline__ void put_pairs(float* to, const float2 (&x)[PAIRS]) {
  Words<2 * PAIRS> words;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    words.word[2 * i] = __float_as_uint(x[i].x);
    words.word[2 * i + 1] = __float_as_uint(x[i].y);
  }
  *reinterpret_cast<Words<2 * PAIRS>*>(to) = words;
}
template <class T16, int PAIRS>
__device__ __forceinline__ void load_pairs(float2 (&x)[PAIRS], const T16* row) {
  const Words<PAIRS> words = *reinterpret_cast<const Words<PAIRS>*>(row);
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) x[i] = unpack<T16>(words.word[i]);
}
template <int PAIRS>
__device__ __forceinline__ void load_pairs(float2 (&x)[PAIRS], const float* row) {
  const Words<2 * PAIRS> words = *reinterpret_cast<const Words<2 * PAIRS>*>(row);
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    x[i] = {__uint_as_float(words.word[2 * i]), __uint_as_float(words.word[2 * i + 1])};
  }
}

/// A log2 decay as -scale min(shape, limit): multiplied where it is summed, it costs an instruction
/// less. bias: times bias_factor.
template <class Kind>
struct SummedGate {
  static constexpr float bias_factor = 1;
  const FastGate& gate;
  __device__ __forceinline__ float scale() const { return 1; }
  __device__ __forceinline__ float shape(float raw, float bias) const {
    return -Kind::decay(gate, raw + bias);
  }
};
template <>
struct SummedGate<FastSoftplusGate> {
  static constexpr float bias_factor = kLog2E;
  const FastGate& gate;
  __device__ __forceinline__ float scale() const { return gate.slope; }
  __device__ __forceinline__ float shape(float raw, float bias) const {
    return FastSoftplusGate::shape(fmaf(raw, kLog2E, bias));
  }
};
template <>
struct SummedGate<FastBoundedGate> {
  static constexpr float bias_factor = 1;
  const FastGate& gate;
  __device__ __forceinline__ float scale() const { return kLog2E * gate.scale; }
  __device__ __forceinline__ float shape(float raw, float bias) const {
    return FastBoundedGate::shape(gate, raw + bias);
  }
};
struct SummedNoGate {
  static constexpr float bias_factor = 0;
  __device__ __forceinline__ float scale() const { return kLog2E; }
  __device__ __forceinline__ float shape(float g, float) const { return -g; }
};

/// The raw gates of the warp's rows, in place, -> the running sums of their log2 decays, of input
/// `rows` exist. 16-bit gates lie in the second half of a row.
template <class Io, int K, class Gate>
__device__ __forceinline__ void sum_rows(PrepShared<Io, K>& shared, int32_t dtype, int rows,
                                         const float* bias_row, Gate gate) {
  constexpr int kPairs = K / 64;
  constexpr int kAtOnce = 2;
  constexpr int kRowBytes = PrepTraits<Io, K>::kDecayBytes;
  const int thread = this_thread();
  const int warp = thread / 32;
  const int column = thread % 32 * (2 * kPairs);
  rows -= 8 * warp;
  const float scale = gate.scale();
  const float limit = -kLogFloor2 / scale;
  float2 bias[kPairs];
  float2 sum[kPairs] = {};
  load_pairs(bias, bias_row + column);
#pragma unroll
  for (float2& x : bias) x = x * Gate::bias_factor;
  unsigned char* row = shared.rows.decay[8 * warp];
#pragma unroll 1
  for (int t = 0; t < 8; t += kAtOnce, row += kAtOnce * kRowBytes) {
    float2 z[kAtOnce][kPairs];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const unsigned char* const from = row + u * kRowBytes;
      if (dtype == kBFloat16) {
        load_pairs(z[u], reinterpret_cast<const __nv_bfloat16*>(from) + K + column);
      } else if (dtype == kFloat16) {
        load_pairs(z[u], reinterpret_cast<const __half*>(from) + K + column);
      } else {
        load_pairs(z[u], reinterpret_cast<const float*>(from) + column);
      }
    }
    __syncwarp();  // other lanes' gates lie where this one's sums go
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const float x = min_or_nan(gate.shape(z[u][i].x, bias[i].x), limit);
        const float y = min_or_nan(gate.shape(z[u][i].y, bias[i].y), limit);
        if (t + u < rows) sum[i] = {fmaf(-scale, x, sum[i].x), fmaf(-scale, y, sum[i].y)};
      }
      put_pairs(reinterpret_cast<float*>(row + u * kRowBytes) + column, sum);
    }
  }
  put_pairs(&shared.totals[warp][column], sum);
}

template <class Io, int K>
__device__ __forceinline__ void sum_gates(PrepShared<Io, K>& shared, const GateParams& params,
                                          const PrepItem& item, const float* bias) {
  const int32_t dtype = params.g.dtype;
  if (params.kind == kGateNone) {
    sum_rows(shared, dtype, item.rows, bias, SummedNoGate{});
    return;
  }
  const FastGate gate = item.gate;
  with_gate(params, gate, [&]<class Kind>(Kind) {
    sum_rows(shared, dtype, item.rows, bias, SummedGate<Kind>{gate});
  });
}

/// log2 decay of a whole block in this lane's columns.
template <class Io, int K>
__device__ __forceinline__ void sum_block(float2 (&total)[K / 64], const PrepShared<Io, K>& shared,
                                          int block, int column) {
  float2 second[K / 64];
  load_pairs(total, &shared.totals[2 * block][column]);
  load_pairs(second, &shared.totals[2 * block + 1][column]);
#pragma unroll
  for (int i = 0; i < K / 64; ++i) total[i] = total[i] + second[i];
}

template <int PAIRS>
__device__ __forceinline__ bool any_far(const float2 (&total)[PAIRS]) {
  bool far = false;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    far = far || total[i].x < -kFarBlock || total[i].y < -kFarBlock;
  }
  return __any_sync(~0u, far) != 0;
}

/// The decay of the tokens of a warp's block that are not its own.
template <class Io, int K>
__device__ __forceinline__ void sum_before(float2 (&before)[K / 64],
                                           const PrepShared<Io, K>& shared, int warp, int column) {
#pragma unroll
  for (float2& x : before) x = {0, 0};
  if (warp % 2 != 0) load_pairs(before, &shared.totals[warp - 1][column]);
}

/// Phase 2 of a warp of block kOf; whether one of the blocks is far. Rows that do not exist hold
/// zeros.
template <class Io, int K, int kOf>
__device__ __forceinline__ bool write_tiles(PrepShared<Io, K>& shared, uint64_t record, int warp,
                                            int column) {
  using R = Record<K>;
  constexpr int kPairs = K / 64;
  constexpr int kAtOnce = 2;
  constexpr bool kSame = kOf == 0 && kIsBf16<Io>;  // tiles and record hold the same rows
  float2 factor[2][kPairs];
  bool far[2];
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    float2 total[kPairs];
    sum_block(total, shared, block, column);
    far[block] = any_far(total);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) factor[block][i] = exp2_pair(total[i]);
  }
  float2 before[kPairs];
  sum_before(before, shared, warp, column);
  const int first = 8 * warp;
  // Records start at multiples of 128 bytes: the swizzle is an XOR of address bits 4 to 6.
  const auto place = static_cast<uint32_t>(first * kPanelRowBytes + column % 64 * 2);
  uint64_t read = record + (R::kRead + column / 64 * (2 * kChunk * kPanelRowBytes)) + place;
  uint64_t update = record + (R::kUpdate + column / 64 * (kChunk * kPanelRowBytes)) + place;
#pragma unroll 1
  for (int t = 0; t < 8; t += kAtOnce) {
    float2 G[kAtOnce][kPairs];
    float2 qs[kAtOnce][kPairs];
    float2 ks[kAtOnce][kPairs];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      load_pairs(G[u], shared.G(first + t + u) + column);
      load_pairs(qs[u], &shared.rows.raw_q()[first + t + u][column]);
      load_pairs(ks[u], &shared.rows.raw_k()[first + t + u][column]);
    }
    __syncwarp();  // tiles take the place of other lanes' sums
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int row = first + t + u;
      const float2 norm = shared.norm[row];
      float2(&q)[kPairs] = qs[u];
      float2(&k)[kPairs] = ks[u];
      float2 last[kPairs];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        G[u][i] = G[u][i] + before[i];
        k[i] = k[i] * norm.y;
        last[i] = k[i] * exp2_pair(-G[u][i]);
      }
      put_pairs(&shared.down()[row][column], last);
      if (far[kOf]) {  // 2^-G' may be infinite
        sum_block(last, shared, kOf, column);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) last[i] = k[i] * exp2_pair(last[i] - G[u][i]);
      } else {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) last[i] = last[i] * factor[kOf][i];
      }
      if constexpr (kOf == 0) {
        put_pairs(&shared.rows.cross()[row][column], last);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) last[i] = last[i] * factor[1][i];
      }
      const auto swizzle = static_cast<uint64_t>(static_cast<uint32_t>(t + u) << 4);
      store_global((update ^ swizzle) + u * kPanelRowBytes, pack_pairs<Io>(last));
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const float2 up = exp2_pair(G[u][i]);
        q[i] = q[i] * norm.x * up;
        k[i] = k[i] * up;
      }
      if constexpr (!kSame) {
        put_pairs(&shared.rows.q[row][column], q);
        put_pairs(&shared.rows.k[row][column], k);
      }
      if constexpr (kOf == 1) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          q[i] = q[i] * factor[0][i];
          k[i] = k[i] * factor[0][i];
        }
      }
      const Words<kPairs> qe = pack_pairs<Io>(q);
      const Words<kPairs> ke = pack_pairs<Io>(k);
      if constexpr (kSame) {
        *reinterpret_cast<Words<kPairs>*>(&shared.rows.q[row][column]) = qe;
        *reinterpret_cast<Words<kPairs>*>(&shared.rows.k[row][column]) = ke;
      }
      store_global((read ^ swizzle) + u * kPanelRowBytes, ke);
      store_global((read ^ swizzle) + (u + kChunk) * kPanelRowBytes, qe);
    }
    read += kAtOnce * kPanelRowBytes;
    update += kAtOnce * kPanelRowBytes;
  }
  return far[0] || far[1];
}

/// 2^G_end to the record.
template <class Io, int K>
__device__ __forceinline__ void write_decay(const PrepShared<Io, K>& shared, uint64_t record,
                                            int column) {
  float2 total[2][K / 64];
  sum_block(total[0], shared, 0, column);
  sum_block(total[1], shared, 1, column);
#pragma unroll
  for (int i = 0; i < K / 64; ++i) {
    const float2 end = exp2_pair(total[0][i] + total[1][i]);
    store_global(record + static_cast<uint32_t>(Record<K>::kDecay + (column + 2 * i) * 4),
                 Words<2>{__float_as_uint(end.x), __float_as_uint(end.y)});
  }
}

/// A block of prep on its way through the items.
template <class Io, int K>
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
    const auto from = [&](int input) {
      return bytes_of<K>(p, item, input, rows > 0 ? first : 0).start;
    };
    constexpr int kStride = Traits::kStride * 2;
    copy_rows<2 * K>(reinterpret_cast<unsigned char*>(shared.rows.raw_q()[first]), kStride, from(0),
                     p.q.stride[1] * 2, rows);
    copy_rows<2 * K>(reinterpret_cast<unsigned char*>(shared.rows.raw_k()[first]), kStride, from(1),
                     p.k.stride[1] * 2, rows);
    load_gates(item);
  }
  __device__ __forceinline__ void load_gates(const PrepItem& item) const {
    const int first = warp() * kTokens;
    const int rows = item.rows - first;
    const std::byte* const from = bytes_of<K>(p, item, 2, rows > 0 ? first : 0).start;
    unsigned char* const to = shared.rows.decay[first];
    if (is_wide(p.gate.g)) {
      copy_rows<4 * K>(to, Traits::kDecayBytes, from, p.gate.g.stride[1] * 4, rows);
    } else {
      copy_rows<2 * K>(to + 2 * K, Traits::kDecayBytes, from, p.gate.g.stride[1] * 2, rows);
    }
    commit_copies();
  }

  /// The warp's rows to L2.
  __device__ __forceinline__ void prefetch(const PrepItem& item) const {
    const int thread = this_thread();
    const int row = thread / 32 * kTokens + thread % kTokens;
    const int input = thread % 32 / kTokens;
    if (input == 3 || row >= item.rows) return;
    const PrepRowBytes from = bytes_of<K>(p, item, input, row);
    for (uint32_t i = 0; i < from.bytes; i += 128) prefetch_L2(from.start + i);
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

  __device__ __forceinline__ void publish(const PrepItem& item) const {
    __syncwarp();
    if (this_thread() % 32 != 0) return;
    asm volatile(
        "fence.acq_rel.gpu;\n st.release.gpu.global.u32 [%0], 1;" ::"l"(p.ready + item.record)
        : "memory");
  }

  __device__ __forceinline__ void put_gate(PrepItem& item) const {
    if (item.rows == 0 || p.gate.kind == kGateNone) return;
    const FastGate gate = fast_gate_of(p.gate, item.hv);
    if (this_thread() % 32 == 0) item.gate = gate;
  }

  /// Finds the item after the next one.
  __device__ __forceinline__ void find_after(uint32_t turn) const {
    const PrepItem& next = item(turn + 1);
    PrepItem& found = item(turn + 2);
    if (next.rows > 0) {
      find_item(found, p, uint64_t{next.number} + gridDim.x);
      __syncwarp();
      put_gate(found);
    } else {
      found.rows = 0;
    }
  }

  /// Finds the first two items and starts the loads of the first one; whether there is one.
  __device__ __forceinline__ bool start() const {
    if (p.ready != nullptr) clear_ready(p);
    if (warp() == 0) find_item(shared.item[0], p, blockIdx.x);
    __syncthreads();
    if (shared.item[0].rows == 0) return false;
    load(shared.item[0]);
    if (warp() == 0) {
      put_gate(shared.item[0]);
    } else if (warp() == 1) {
      find_after(~0u);
    }
    put_bias(0, bias_of_column(shared.item[0]));
    __syncthreads();
    if (shared.item[1].rows > 0) put_bias(1, bias_of_column(shared.item[1]));
    return true;
  }

  __device__ __forceinline__ void run() const {
    if (!start()) return;
    float bias = 0;  // of the item after the next
    for (uint32_t turn = 0;; ++turn) {
      decay(turn);
      if (turn > 0) put_bias(turn + 1, bias);
      __syncthreads();
      tiles(turn);
      __syncthreads();
      compute_scores(shared, shared.beta[turn % 2], record_of(item(turn)), warp());
      if (warp() == 3) find_after(turn);
      __syncthreads();
      if (shared.has_far) replace_far(item(turn), turn);
      const bool more = item(turn + 1).rows > 0;
      if (more) load(item(turn + 1));
      if (item(turn + 2).rows > 0) {
        prefetch(item(turn + 2));
        bias = bias_of_column(item(turn + 2));
      }
      if (turn % Traits::kWarps == static_cast<uint32_t>(warp())) {
        write_solve(shared, shared.beta[turn % 2], record_of(item(turn)), p.split_beta);
        if (p.ready != nullptr) publish(item(turn));
      }
      if (!more) return;
    }
  }
};

template <class Io, int K>
__global__ void __launch_bounds__(kPrepThreads, kIsBf16<Io> ? 6 : 2)
    sm90_chunk_fwd_prep(const __grid_constant__ PrepParams p) {
  PrepBlock<Io, K>{p, *shared_memory<PrepShared<Io, K>>()}.run();
}

}  // namespace kda::cuda::sm90
