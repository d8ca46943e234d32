// Shared memory of `grad` and the lanes' place in its transposed accumulators.
#pragma once

#include "cuda/sm90/chunk_bwd/grad.h"
#include "cuda/sm90/chunk_fwd/prep.cuh"
#include "cuda/tile/fast_gate.cuh"
#include "cuda/tile/swizzle.cuh"

namespace kda::cuda::sm90 {

/// log2 of the largest factor of a product. -5 a token over 15 tokens is 108.2; below 2^-126 fp32
/// and bf16 lose bits, and q and k need some room.
inline constexpr float kFarRow = 110;
/// Columns of the intra part are arranged: block 0, as block 1 reads block 0, block 1.
inline constexpr int kArranged = 3 * kBlock;
/// Score gradients are sums of two bf16 numbers: a panel has the larger in columns 0 .. 31, what
/// their rounding leaves in 32 .. 63. From one to the other in a descriptor.
inline constexpr uint64_t kRestOfScores = kChunk * 2 >> 4;

/// Of the intra part in either type's kernel.
using Bf16 = __nv_bfloat16;

/// The value of kda::DType.
template <class Io>
inline constexpr int32_t kTypeOf = kIsBf16<Io> ? kBFloat16 : kFloat16;

/// chunk_of for a grid's worth of pairs of chunks, without 64-bit division.
__device__ __forceinline__ Chunk small_chunk_of(const Sequences& s, uint32_t row) {
  if (s.cu.data) return chunk_of(s, row);
  const auto per_row = static_cast<uint32_t>(s.chunks_per_row);
  const uint32_t batch = s.count == 1 ? 0 : row / per_row;
  const int64_t begin = int64_t{row - batch * per_row} * kGradTokens;
  const int64_t rest = s.T - begin;
  return {batch, begin, static_cast<int32_t>(rest < kGradTokens ? rest : kGradTokens)};
}

template <class Io, int K>
struct GradTraits {
  static constexpr int kThreads = 2 * K;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kPairs = K / 2;
  static constexpr int kTokens = kChunk / (kThreads / kPairs);  ///< of a thread: 8
  static constexpr int kValueRows = kChunk * 8 / kThreads;      ///< of a thread, a unit each
  static constexpr bool kHasUnits = !kIsBf16<Io>;               ///< R and dh have units
  static constexpr int kBlocksPerSm = (K == 128 ? 2 : 3) - (kHasUnits ? 1 : 0);
  /// Registers of [dP; dL]: with one warpgroup it has those over the earlier chunk too.
  static constexpr int kScores = K == 128 ? 16 : 32;
  static constexpr int kStride = K + 8;   ///< of q, k, raw g: fragment reads touch all banks
  static constexpr int kGStride = K + 4;  ///< the same for fp32
};

/// threadIdx.x, read where it is used: what follows from it would else be kept in registers across
/// the items, and spilled.
__device__ __forceinline__ int thread_index() {
  int index = static_cast<int>(threadIdx.x);
  asm volatile("" : "+r"(index));
  __builtin_assume(index >= 0);  // divisions by powers of two are shifts
  return index;
}

/// What a thread has of [32 tokens x K]: a column pair and a segment of kTokens tokens.
template <class Io, int K>
struct ColumnPair {
  int column;
  int segment;

  __device__ __forceinline__ ColumnPair() {
    const int tid = thread_index();
    column = tid % GradTraits<Io, K>::kPairs * 2;
    segment = tid / GradTraits<Io, K>::kPairs;
  }
};

/// Tiles of 64 columns of V.
template <int K>
struct ValueTiles {
  unsigned char h[K * kPanelRowBytes];
  unsigned char dh[K * kPanelRowBytes];
  unsigned char v[kChunk * kPanelRowBytes];
  unsigned char do_R[2 * kChunk * kPanelRowBytes];  ///< 32 rows do, 32 rows R
};

/// Operands of the intra part of 64 channels. Factors go up to 2^kFarRow and down as far, which
/// takes bf16's range; its 8 bits are too few, so each is a sum of two bf16 numbers: [larger,
/// rest]. The warpgroup replaces those that rows sum over by those that columns sum over.
union KeyTiles {
  struct {
    unsigned char columns[2][kArranged * kPanelRowBytes];
    unsigned char update[kChunk * kPanelRowBytes];  ///< kg of the earlier chunk
  };
  unsigned char rows[2][2 * kChunk * kPanelRowBytes];  ///< q up, then beta k up
};
template <int K>
struct IntraTiles {
  KeyTiles keys[K / 64];
  unsigned char cross[2 * kChunk * kPanelRowBytes];  ///< dP, dL over the earlier chunk's tokens
};

/// What fp16 has besides.
template <class Io, int K>
struct GradExtra {};
template <int K>
struct GradExtra<__half, K> {
  /// kg in fp16 is the sum of two bf16 numbers.
  alignas(1024) unsigned char update_rest[K / 64][kChunk * kPanelRowBytes];
  float unit;  ///< of what is linear in R or dh and summed over V
};

/// A tensor's rows of tokens, in bytes.
struct RowSource {
  std::byte* data;
  int64_t batch, token, head;

  RowSource() = default;
  __device__ explicit RowSource(const Tensor& t) {
    const int size = t.dtype == kBFloat16 || t.dtype == kFloat16 ? 2 : 4;
    data = static_cast<std::byte*>(t.data);
    batch = t.stride[0] * size;
    token = t.stride[1] * size;
    head = t.stride[2] * size;
  }
  __device__ __forceinline__ void* row(const Chunk& chunk, uint32_t at) const {
    return data + chunk.batch * batch + chunk.begin * token + at * head;
  }
};

/// A pair of chunks.
struct GradPair {
  uint32_t row;  ///< of h and dh
  uint32_t hv;

  /// A step of the grid on, heads fastest.
  __device__ __forceinline__ GradPair next(const GradLaunchParams& p) const {
    const auto HV = static_cast<uint32_t>(p.heads.HV);
    const uint32_t head = hv + p.step.head;
    const bool wraps = head >= HV;
    return {row + p.step.row + (wraps ? 1 : 0), wraps ? head - HV : head};
  }
};

/// What a block works on: a chunk. Of a pair the later one comes first.
struct GradWork {
  Chunk chunk;
  bool crosses;    ///< reads the chunk before, which h stands in front of
  bool carries;    ///< dh stands behind the chunk after it, which came before
  int64_t row;     ///< of `partial`
  int64_t record;  ///< row of the earlier chunk's record
  GradPair pair;
  void* rows[kGradRows];  ///< this chunk's and head's first rows
  uint32_t tiles;         ///< of h that came before
  uint32_t crossings;     ///< items that crossed before
  GradPair after;         ///< where this block's search for the next goes on

  template <class T>
  __device__ __forceinline__ T* at(GradRows tensor) const {
    void* const row = rows[tensor];
    __builtin_assume(__isGlobal(row));  // else stores wait for those to shared memory
    return static_cast<T*>(row);
  }
};

template <class Io, int K>
struct GradShared {
  using Traits = GradTraits<Io, K>;
  union {
    ValueTiles<K> value;
    IntraTiles<K> intra;
  };
  union {
    unsigned char v_new[2 * kChunk * kPanelRowBytes];   ///< of this chunk, then of the earlier one
    unsigned char scores[2 * kChunk * kPanelRowBytes];  ///< dP, then dL
  };
  float G[kChunk][Traits::kGStride];
  alignas(16) Io q[kChunk][Traits::kStride];     ///< then dq
  alignas(16) Io k[kChunk][Traits::kStride];     ///< then dk
  alignas(16) float g[kChunk][Traits::kStride];  ///< raw; 16-bit types fill half of it
  union {
    float totals[kChunk / Traits::kTokens][K];
    alignas(16) float decay_before[K];  ///< 2^G_end of the earlier chunk
  };
  union {
    float state_product[K];  ///< rowsum_V(h . dh)
    float dg_first[K];       ///< gradient of the first token's decay
  };
  union {
    float update_product[K];  ///< rowsum over the earlier chunk's tokens of kg . dkx
    float carry[K];           ///< what the later chunk adds to the dg of the earlier one
  };
  float dg_steps[kChunk / Traits::kTokens][K];  ///< what each segment adds to dg
  float partial[3][Traits::kWarps][kChunk];     ///< sums over the channels of a warp
  float value_product[kChunk];                  ///< rowsum_V(R . v)
  float diagonal[kChunk];                       ///< dP_ii
  float beta[kChunk];
  float beta_slope[kChunk];  ///< d beta / d logit
  float bias[K];
  FastGate gate;
  float norm[2][kChunk];            ///< 1 / |q|, 1 / |k|
  alignas(8) uint64_t states_full;  ///< tiles of h and dh have landed
  uint64_t update_full;             ///< kg and decay_before have
  RowSource sources[kGradRows];     ///< of GradLaunchParams::rows
  GradWork work[2];                 ///< this item and the next: in registers they would be too many
  [[no_unique_address]] GradExtra<Io, K> extra;
};
static_assert(sizeof(GradShared<Bf16, 128>) <= 113 * 1024);
static_assert(sizeof(GradShared<Bf16, 64>) <= 75 * 1024);

/// What 1 is in sums over V that are linear in R or dh.
template <class Io, int K>
__device__ __forceinline__ float unit_of(const GradShared<Io, K>& shared, const GradParams& p) {
  if constexpr (GradTraits<Io, K>::kHasUnits) {
    return shared.extra.unit;
  } else {
    return p.mantissa;
  }
}

/// The second term of one of KeyTiles' operands.
template <int ROWS>
__device__ __forceinline__ PanelTile<ROWS> second_term(const PanelTile<ROWS>& first) {
  return {first.address + PanelTile<ROWS>::kPanelBytes};
}

/// What a thread holds of an accumulator [64 channels x 32 tokens]: register 4 i + 2 c + e is
/// channel(c), token(i, e).
struct GradLane {
  int first_channel;
  int first_token;

  __device__ GradLane(int warp, int lane)
      : first_channel(16 * warp + lane / 4), first_token(2 * (lane % 4)) {}
  __device__ __forceinline__ int channel(int c) const { return first_channel + 8 * c; }
  __device__ __forceinline__ int token(int i, int e) const { return 8 * i + first_token + e; }

  /// f(register, i, c, e) for 8 FIRST <= token < 8 LAST.
  template <int FIRST = 0, int LAST = 4, class F>
  static __device__ __forceinline__ void each(F f) {
#pragma unroll
    for (int i = FIRST; i < LAST; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int e = 0; e < 2; ++e) f(4 * i + 2 * c + e, i, c, e);
      }
    }
  }
};

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/// The same, formed where it is used, as thread_index is.
__device__ __forceinline__ uint32_t fresh_address(const void* p) {
  uint32_t address = shared_address(p);
  asm volatile("" : "+r"(address));
  return address;
}

}  // namespace kda::cuda::sm90
