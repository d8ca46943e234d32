// What the warps of prep share, and how they reach it.
#pragma once

#include "cuda/sm90/chunk_fwd/chunk_fwd.h"
#include "cuda/sm90/chunk_fwd/config.h"
#include "cuda/tile/fast_gate.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/sequence.cuh"

namespace kda::cuda::sm90 {

inline constexpr int32_t kBFloat16 = 1;  ///< values of kda::DType
inline constexpr int32_t kFloat16 = 2;

/// log2 of the largest factor. -5 a token over 16 tokens is 115.4; k has to stay below 2^10 then.
/// Rows near 2^-118 keep q above 2^-15: fp32 and bf16 go down to 2^-133 with fewer bits.
inline constexpr float kFarBlock = 118;
inline constexpr int kBlock = 16;
inline constexpr int kScoreStride = kChunk + 4;

template <class Io>
inline constexpr bool kIsBf16 = __is_same(Io, __nv_bfloat16);

template <bool Bf16>
struct TileElement {
  using Type = __nv_bfloat16;
};
template <>
struct TileElement<false> {
  using Type = float;
};

/// A warp has 8 tokens and all columns, a lane some neighbouring column pairs.
template <class Io, int K>
struct PrepTraits {
  using Tile = typename TileElement<kIsBf16<Io>>::Type;
  static constexpr int kWarps = kPrepThreads / 32;
  static constexpr int kTokens = kChunk / kWarps;
  static constexpr int kPairs = K / 64;
  // Rows 16 bytes apart modulo 128 (32 for fp32): fragment reads touch all banks.
  static constexpr int kStride = K + 8;
  /// Of rows that hold G' in fp32, then the tiles `down` and, if they are bf16, `cross`.
  static constexpr int kDecayBytes = 4 * K + (kIsBf16<Io> ? 16 : 32);
  static constexpr int kDecayStride = kDecayBytes / static_cast<int>(sizeof(Tile));
  static_assert(sizeof(Io) == 2 && (K == 64 || K == 128) && 2 * kTokens == kBlock);
};

/// q, k as loaded, and scaled; bf16 tiles take the place of what was loaded.
template <class Io, int K, bool Bf16 = kIsBf16<Io>>
struct PrepTiles {
  static constexpr int kStride = PrepTraits<Io, K>::kStride;
  static constexpr int kDecayStride = PrepTraits<Io, K>::kDecayStride;
  alignas(16) Io q[kChunk][kStride];
  alignas(16) Io k[kChunk][kStride];
  alignas(16) unsigned char decay[kChunk][PrepTraits<Io, K>::kDecayBytes];
  __device__ Io (*raw_q())[kStride] { return q; }
  __device__ Io (*raw_k())[kStride] { return k; }
  __device__ Io (*cross())[kDecayStride] {
    return reinterpret_cast<Io(*)[kDecayStride]>(&decay[0][2 * K]);
  }
};
template <class Io, int K>
struct PrepTiles<Io, K, false> {
  static constexpr int kStride = PrepTraits<Io, K>::kStride;
  static constexpr int kDecayStride = PrepTraits<Io, K>::kDecayStride;
  alignas(16) float q[kChunk][kStride];
  alignas(16) float k[kChunk][kStride];
  alignas(16) Io loaded_q[kChunk][kStride];
  alignas(16) Io loaded_k[kChunk][kStride];
  alignas(16) unsigned char decay[kChunk][PrepTraits<Io, K>::kDecayBytes];
  alignas(16) float cross_rows[kBlock][kDecayStride];
  __device__ Io (*raw_q())[kStride] { return loaded_q; }
  __device__ Io (*raw_k())[kStride] { return loaded_k; }
  __device__ float (*cross())[kDecayStride] { return cross_rows; }
};

/// What a block works on, and where it begins: offsets of the first token in elements.
struct PrepItem {
  int64_t offset[4];  ///< of q, k, g, beta
  uint32_t record;
  uint32_t hv;
  int32_t rows;
  FastGate gate;
};

template <class Io, int K>
struct PrepShared {
  using Traits = PrepTraits<Io, K>;
  using Tile = typename Traits::Tile;
  /// One is being solved, one worked on, one loaded, one sought.
  static constexpr int kItems = 4;

  PrepTiles<Io, K> rows;
  /// -beta k k^T below the diagonal: the diagonal blocks transposed. Then their inverses.
  alignas(16) float N[kChunk][kScoreStride];
  alignas(16) float totals[Traits::kWarps][K];  ///< sums of the warps' decays
  alignas(16) float bias[2][K];                 ///< of the gates of this item and the next
  float2 norm[kChunk];                          ///< 1 / |q|, 1 / |k|
  float beta[2][kChunk];                        ///< of this item and the next
  PrepItem item[kItems];
  bool has_far;

  __device__ Tile (*down())[Traits::kDecayStride] {
    return reinterpret_cast<Tile(*)[Traits::kDecayStride]>(rows.decay);
  }
  __device__ float* G(int row) { return reinterpret_cast<float*>(rows.decay[row]); }
};

/// A column pair of a row in shared memory.
template <class Io>
__device__ __forceinline__ float2 pair_at(const Io* row, int column) {
  return unpack<Io>(*reinterpret_cast<const uint32_t*>(row + column));
}
__device__ __forceinline__ float2 pair_at(const float* row, int column) {
  return *reinterpret_cast<const float2*>(row + column);
}

/// Stores a column pair into a tile.
__device__ __forceinline__ void put_pair(__nv_bfloat16* to, float2 x) {
  *reinterpret_cast<uint32_t*>(to) = pack<__nv_bfloat16>(x.x, x.y);
}
__device__ __forceinline__ void put_pair(float* to, float2 x) {
  *reinterpret_cast<float2*>(to) = x;
}

/// N words, aligned together: one access.
template <int N>
struct alignas(4 * N) Words {
  uint32_t word[N];
};

/// Stores words into the record.
__device__ __forceinline__ void store_global(uint64_t address, Words<1> x) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(address), "r"(x.word[0]));
}
__device__ __forceinline__ void store_global(uint64_t address, Words<2> x) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(address), "r"(x.word[0]), "r"(x.word[1]));
}
__device__ __forceinline__ void store_global(uint64_t address, Words<4> x) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x.word[0]),
               "r"(x.word[1]), "r"(x.word[2]), "r"(x.word[3]));
}

__device__ __forceinline__ float2 exp2_pair(float2 x) { return {exp2_of(x.x), exp2_of(x.y)}; }
__device__ __forceinline__ float2 operator+(float2 x, float2 y) { return {x.x + y.x, x.y + y.y}; }
__device__ __forceinline__ float2 operator-(float2 x, float2 y) { return {x.x - y.x, x.y - y.y}; }
__device__ __forceinline__ float2 operator-(float2 x) { return {-x.x, -x.y}; }
__device__ __forceinline__ float2 operator*(float2 x, float2 y) { return {x.x * y.x, x.y * y.y}; }
__device__ __forceinline__ float2 operator*(float2 x, float y) { return {x.x * y, x.y * y}; }

/// threadIdx.x, asked for anew: what follows from it is computed where it is used, not kept in
/// registers across a loop.
__device__ __forceinline__ int this_thread() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  __builtin_assume(x >= 0 && x < kPrepThreads);
  return x;
}

/// The column pairs of a lane: one access each.
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

}  // namespace kda::cuda::sm90
